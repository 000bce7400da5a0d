"use strict";
(() => {
  const { looks, figures } = JSON.parse(document.getElementById("drawings").textContent);
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

  // How things look; what they are, in numbers and words, comes with the figures.
  const DASHES = { "-": "solid", "--": "dash", "-.": "dashdot", ":": "dot" };
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star"];
  const LOW = "#0072B2", HIGH = "#D55E00";
  const FRESH_TO_STALE = [[0, "#56B4E9"], [0.5, "#CC79A7"], [1, HIGH]];
  const DIVERGING = [[0, LOW], [0.5, "@paper"], [1, HIGH]];
  const SEQUENTIAL = [[0, "@paper"], [1, "@strong"]];
  const bar = (title) => ({ title: { text: title, side: "top" }, thickness: 12 });
  const lines = { type: "scatter", mode: "lines" };
  const points = { type: "scatter", mode: "markers" };
  const TRACES = {
    curve: lines,
    band: { ...lines, fill: "toself", line: { width: 0 }, hoverinfo: "skip", showlegend: false },
    thin: { ...lines, line: { width: 1.2, dash: "dot" }, showlegend: false },
    steps: { ...lines, line: { shape: "hvh" } },
    marked: { type: "scatter", mode: "lines+markers", marker: { size: 6 } },
    points: { ...points, marker: { size: 9 } },
    seeds: { ...points, marker: { size: 10, opacity: 0.7 }, showlegend: false },
    mean: { ...points, marker: { symbol: "line-ns-open", size: 22, line: { width: 3 } }, showlegend: false },
    bars: { type: "bar", marker: { color: "@strong" }, showlegend: false },
    events: { type: "bar" },
    classes: {
      type: "heatmap", zmin: 0, zmax: 100, colorscale: SEQUENTIAL, colorbar: { title: { text: "%" } },
      hovertemplate: "%{y}, class %{x}: %{z:.0f} %<extra></extra>",
    },
    labels: {
      type: "heatmap", zmin: 0, colorscale: SEQUENTIAL, colorbar: bar("share (%)"),
      hovertemplate: "client %{x}, class %{y}: %{customdata} examples, %{z:.0f} %<extra></extra>",
    },
    utility: {
      type: "heatmap", colorscale: DIVERGING, colorbar: bar("utility"),
      hovertemplate: "client %{y}, round %{x}: %{z:.3g}<extra></extra>",
    },
    boosts: {
      ...points, hovertemplate: "%{text}<extra></extra>", showlegend: false,
      marker: { colorscale: DIVERGING, size: 8, line: { width: 0.8, color: "@muted" }, colorbar: bar("utility") },
    },
    work: { ...lines, line: { color: "@muted", width: 3 }, opacity: 0.55, hoverinfo: "skip", showlegend: false },
    arrivals: {
      ...points, showlegend: false,
      marker: { size: 6, colorscale: FRESH_TO_STALE, showscale: true, cmin: 1, colorbar: bar("staleness") },
    },
  };
  const axis = (text, more) => ({ title: { text }, ...more });
  const FROM_ZERO = { rangemode: "tozero" };
  const LAYOUTS = {
    curves: { hovermode: "x unified", height: 440 },
    classes: { xaxis: axis("class") },
    tiers: { xaxis: axis("clients", { range: [-0.5, 2.5] }) },
    lengths: { xaxis: axis("round"), yaxis: axis("length (L2 norm)", FROM_ZERO), hovermode: "x unified" },
    staleness: { xaxis: axis("staleness τ (rounds)"), yaxis: axis("share of the uploads (%)"), bargap: 0.08 },
    weights: { yaxis: axis("weight (1 = equal share)", FROM_ZERO) },
    rejected: { xaxis: axis("round"), barmode: "stack" },
    boosts: { yaxis: axis("boost (in average uploads)", { zeroline: true, zerolinewidth: 2 }), height: 400 },
    utility: { xaxis: axis("round"), yaxis: { autorange: "reversed" }, height: 460 },
    labels: { yaxis: axis("class"), height: 340 },
    timeline: { yaxis: axis("client, from fast to slow", { autorange: "reversed", zeroline: false }) },
  };
  const level = (y) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, layer: "below",
    line: { color: "@muted", width: 1, dash: "dot" },
  });

  const colourOf = (method) => (looks[method][0] === "#000000" ? "@ink" : looks[method][0]);

  // A trace as Plotly takes it, from its kind and its method; all traces of a method can be hidden together.
  function styled({ kind, method, name, hover, ...own }) {
    const shown = method in looks;
    const color = shown ? colourOf(method) : undefined;
    const look = shown ? {
      meta: method,
      legendgroup: method,
      line: { color, dash: DASHES[looks[method][1]], width: 2 },
      marker: { color, symbol: SYMBOLS[Object.keys(looks).indexOf(method) % SYMBOLS.length] },
      fillcolor: color === "@ink" ? "@inkband" : `${color}29`,
    } : {};
    const words = {};
    if (name) words.name = name; // as Plotly takes it, where "method" is as it is
    if (hover) words.hovertemplate = `${hover}<extra>${name || ""}</extra>`;
    return { ...merged(merged(look, TRACES[kind]), own), ...words };
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
      const whole = merged(styled(trace), view.data[i]);
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
    }, coloured(merged(LAYOUTS[spec.name] || {}, merged(spec.layout, view.layout))));
    if (typeof layout.level === "number") layout.shapes = [coloured(level(layout.level))];
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

  function paintSwatches() {
    document.querySelectorAll(".swatch").forEach((swatch) => {
      swatch.style.background = coloured(colourOf(swatch.dataset.method));
    });
  }
  function repaint() {
    paintSwatches();
    drawn().forEach(draw);
  }
  paintSwatches();
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
