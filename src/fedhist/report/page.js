"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const hidden = {}; // methods that the reader has hidden, by section
  const PAPER_WIDTH = 660;
  let printing = false;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // Colours such as "@ink" depend on the page's background.
  const coloured = (value) => {
    if (typeof value === "string") return value[0] === "@" ? css(value.slice(1)) : value;
    if (Array.isArray(value)) return value.some((each) => typeof each !== "number") ? value.map(coloured) : value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
    }
    return value;
  };

  const merged = (base, patch) => {
    const result = { ...base };
    for (const [key, value] of Object.entries(patch || {})) {
      const both = value && typeof value === "object" && !Array.isArray(value) && typeof result[key] === "object";
      result[key] = both ? merged(result[key], value) : value;
    }
    return result;
  };

  // What depends on the switches: keys are choices, "*" stands for any.
  function chosen(spec) {
    const places = spec.view.split(" ");
    const fitting = Object.entries(spec.views)
      .filter(([key]) => key.split(" ").every((each, i) => each === "*" || each === places[i]))
      .map(([, patch]) => patch);
    return {
      data: spec.data.map((_, i) => fitting.reduce((all, patch) => merged(all, (patch.data || [])[i]), {})),
      layout: fitting.reduce((all, patch) => merged(all, patch.layout), {}),
    };
  }

  const sectionOf = (node) => node.closest("section.group").id;

  // Plotly makes room for a legend only after it has drawn, which is too late for a printer.
  function legendHeight(data, width) {
    const widths = data.filter((trace) => trace.name && trace.showlegend !== false && trace.visible !== false)
      .map((trace) => 48 + 7 * trace.name.length);
    if (!widths.length) return 0;
    const oneLine = widths.reduce((a, b) => a + b) <= width;
    const columns = Math.max(1, Math.floor(width / Math.max(...widths)));
    return 21 * (oneLine ? 1 : Math.ceil(widths.length / columns));
  }

  function drawing(figure) {
    const spec = figures[figure.id];
    const view = chosen(spec);
    const gone = hidden[sectionOf(figure)] || new Set();
    const data = spec.data.map((trace, i) => {
      const whole = merged(trace, view.data[i]);
      for (const part of ["line", "marker", "fillcolor", "colorscale"]) {
        if (part in whole) whole[part] = coloured(whole[part]);
      }
      if (gone.has(whole.meta)) whole.visible = false;
      return whole;
    });
    const width = printing ? PAPER_WIDTH : figure.clientWidth;
    const legend = legendHeight(data, width - 80);
    const axis = { gridcolor: css("grid"), linecolor: css("line"), zerolinecolor: css("line"), automargin: true };
    const layout = merged({
      height: 360,
      margin: { l: 48, r: 12, t: 14 + legend, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("ink"), family: "system-ui, sans-serif", size: width < 480 ? 11 : 12.5 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: css("panel"), bordercolor: css("line"), font: { color: css("ink") } },
      xaxis: axis,
      yaxis: axis,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("muted"), activecolor: css("ink") },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      showlegend: data.some((trace) => trace.showlegend !== false),
    }, coloured(merged(spec.layout, view.layout)));
    if (printing) {
      layout.width = PAPER_WIDTH;
      layout.height = layout.height > 500 ? 480 : Math.min(layout.height, figure.matches(".wide") ? 265 : 225);
    }
    layout.height += Math.max(0, legend - 21); // a long legend takes nothing from the figure
    return [data, layout, { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] }];
  }

  function draw(figure) {
    Plotly.react(figure.querySelector(".plot"), ...drawing(figure));
    figure.dataset.drawn = figures[figure.id].view;
  }

  const drawn = () => document.querySelectorAll("figure[data-drawn]");
  const open = (figure) => figure.closest("details.figures").open;

  // Those in sight first; the others when there is time, so that printing finds them.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !("drawn" in entry.target.dataset)) draw(entry.target);
    }
  }, { rootMargin: "300px" });
  document.querySelectorAll("figure").forEach((figure) => seen.observe(figure));

  const later = window.requestIdleCallback || ((work) => setTimeout(work, 30));
  function drawRest() {
    const next = [...document.querySelectorAll("figure:not([data-drawn])")].find(open);
    if (!next) {
      document.documentElement.dataset.ready = "yes";
      return;
    }
    draw(next);
    later(drawRest);
  }
  later(drawRest);
  document.querySelectorAll("details.figures").forEach((box) => box.addEventListener("toggle", () => later(drawRest)));

  function repaint() {
    document.querySelectorAll(".swatch").forEach((swatch) => {
      swatch.style.background = coloured(swatch.dataset.colour);
    });
    drawn().forEach(draw);
  }
  document.querySelectorAll(".swatch").forEach((swatch) => {
    swatch.style.background = coloured(swatch.dataset.colour);
  });
  dark.addEventListener("change", repaint);

  document.querySelectorAll(".switch").forEach((box) => box.addEventListener("change", (event) => {
    const figure = box.closest("figure");
    const spec = figures[figure.id];
    const places = spec.view.split(" ");
    places[Number(box.dataset.place)] = event.target.value;
    spec.view = places.join(" ");
    draw(figure);
  }));

  document.querySelectorAll(".methods").forEach((box) => box.addEventListener("change", () => {
    const section = sectionOf(box);
    hidden[section] = new Set([...box.querySelectorAll("input:not(:checked)")].map((input) => input.value));
    document.querySelectorAll(`#${section} figure[data-drawn]`).forEach(draw);
  }));

  addEventListener("beforeprint", () => {
    printing = true;
    document.documentElement.classList.add("printing"); // light colours, before the browser has changed to paper
    document.querySelectorAll("figure").forEach((figure) => open(figure) && draw(figure));
  });
  addEventListener("afterprint", () => {
    printing = false;
    document.documentElement.classList.remove("printing");
    repaint();
  });
})();
