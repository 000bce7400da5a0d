// How things look; what they are, in numbers and words, comes with the figures.
const { looks, staleness, figures } = JSON.parse(document.getElementById("drawings").textContent);
const NIGHT = matchMedia("(prefers-color-scheme: dark)");
const PAPER_WIDTH = 660;
const PICTURE_WIDTH = 1000;
const LABELLED_WIDTH = 480; // from which on lines have names at their ends
const FEW_BANDS = 5; // more would hide each other
const LINE = 15; // pixels of a label's height

const page = { hidden: {}, paper: false }; // methods hidden by the reader, by section; whether drawn on white

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const night = () => NIGHT.matches && !page.paper;
const colourOf = (method) => looks[method][night() ? 1 : 0];

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
    data: spec.data.map((trace, i) => fitting.reduce((all, patch) => merged(all, (patch.data || [])[i]), trace)),
    layout: fitting.reduce((all, patch) => merged(all, patch.layout), spec.layout),
  };
}

const DASHES = { "-": "solid", "--": "dash", "-.": "dashdot", ":": "dot" };
const SYMBOLS = {
  o: "circle", s: "square", D: "diamond", "^": "triangle-up", P: "cross", X: "x", v: "triangle-down", "*": "star",
};
const LOW = "#0072B2", HIGH = "#D55E00";
const DIVERGING = [[0, LOW], [0.5, "@panel"], [1, HIGH]];
const SEQUENTIAL = [[0, "@panel"], [1, "@strong"]];
const bar = (title) => ({ title: { text: title, side: "top" }, thickness: 10, outlinewidth: 0 });
const lines = { type: "scatter", mode: "lines" };
const points = { type: "scatter", mode: "markers" };
const TRACES = {
  curve: { ...lines, line: { width: 2 } },
  band: { ...lines, fill: "toself", line: { width: 0 }, hoverinfo: "skip" },
  thin: { ...lines, line: { width: 1.2, dash: "dot" } },
  steps: { ...lines, line: { shape: "hvh" } },
  marked: { type: "scatter", mode: "lines+markers", marker: { size: 6 } },
  ended: { ...points, marker: { size: 11, symbol: "x-thin", line: { width: 3 } } },
  seeds: { ...points, marker: { size: 9, opacity: 0.75 } },
  mean: { ...points, marker: { symbol: "line-ns-open", size: 18, line: { width: 3 } } },
  bars: { type: "bar", marker: { color: "@strong" } },
  events: { type: "bar", showlegend: true },
  classes: {
    type: "heatmap", zmin: 0, zmax: 100, colorscale: SEQUENTIAL, colorbar: bar("%"), xgap: 2, ygap: 2,
    hovertemplate: "%{y}, class %{x}: %{z:.0f}%{text} %<extra></extra>",
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
    ...points, hovertemplate: "%{text}<extra></extra>",
    marker: { colorscale: DIVERGING, size: 8, line: { width: 0.8, color: "@muted" }, colorbar: bar("utility") },
  },
  work: { ...lines, line: { color: "@muted", width: 3 }, opacity: 0.5, hoverinfo: "skip" },
  attacks: { ...lines, line: { color: "@bad", width: 3 }, opacity: 0.7, hoverinfo: "skip" },
  arrivals: { ...points, marker: { size: 6, showscale: true, cmin: 1, colorbar: bar("staleness") } },
  refused: {
    ...points, hovertemplate: "%{text}<extra></extra>",
    marker: { symbol: "x-thin", size: 8, line: { width: 2, color: "@bad" } },
  },
};
const axis = (text, more) => ({ title: { text }, ...more });
const FROM_ZERO = { rangemode: "tozero" };
const LAYOUTS = {
  curves: { height: 460 },
  classes: { xaxis: axis("class", { type: "category" }), yaxis: { autorange: "reversed" } },
  lengths: { xaxis: axis("round"), yaxis: axis("length (L2 norm)", FROM_ZERO) },
  staleness: { xaxis: axis("staleness τ (rounds)"), yaxis: axis("share of the uploads (%)"), bargap: 0.08 },
  weights: { yaxis: axis("weight (1 = equal share)", FROM_ZERO) },
  rejected: { xaxis: axis("round"), barmode: "stack" },
  boosts: { yaxis: axis("boost (in average uploads)", { zeroline: true, zerolinewidth: 2 }), height: 400 },
  utility: { xaxis: axis("round"), yaxis: { autorange: "reversed" }, height: 460 },
  labels: { yaxis: axis("class"), height: 340 },
  timeline: { yaxis: axis("client, from fast to slow", { autorange: "reversed", zeroline: false }) },
};
const LABELLED = ["curve", "marked", "steps"];
const level = (y) => ({
  type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, layer: "below",
  line: { color: "@muted", width: 1, dash: "dot" },
});

const alpha = (colour, share) => `${colour}${Math.round(255 * share).toString(16).padStart(2, "0")}`;

// A trace as Plotly takes it, from its kind and its method.
function styled({ kind, method, name, hover, columns, ...own }, place) {
  const known = method in looks;
  const color = known ? colourOf(method) : undefined;
  const look = known ? {
    meta: method,
    line: { color, dash: DASHES[looks[method][2]], width: 2 },
    marker: { color, symbol: SYMBOLS[looks[method][3]], line: { color, width: 0 } },
    fillcolor: color && alpha(color, 0.14),
  } : {};
  const words = { uid: `t${place}` };
  if (name) words.name = name; // as Plotly takes it, where "method" is as it is
  if (hover) words.hovertemplate = `${hover}<extra>${name || ""}</extra>`;
  const whole = { showlegend: false, ...merged(merged(look, TRACES[kind]), own), ...words };
  if (kind === "arrivals") {
    whole.marker.colorscale = staleness.map((shade, i) => [i / 2, shade[night() ? 1 : 0]]);
  }
  for (const part of ["line", "marker", "fillcolor", "colorscale"]) {
    if (part in whole) whole[part] = coloured(whole[part]);
  }
  return whole;
}

const sectionOf = (node) => node.closest("section.group").id;
const isHidden = (figure, method) => (page.hidden[sectionOf(figure)] || new Set()).has(method);

// Names at the ends of lines, on a wide enough figure: which method's is whose, before anything is drawn.
function labelled(spec, view, figure, width) {
  if (width < LABELLED_WIDTH) return [];
  const found = view.data.flatMap((trace, i) => LABELLED.includes(trace.kind) && trace.method in looks
    && trace.visible !== false && !isHidden(figure, trace.method) ? [{ place: i, method: trace.method, name: trace.name }] : []);
  const methods = new Set(found.map((each) => each.method));
  return methods.size === found.length && found.length > 1 ? found : [];
}

const shortened = (name, most) => {
  const plain = new DOMParser().parseFromString(name, "text/html").documentElement.textContent;
  return plain.length <= most ? name : `${[...plain].slice(0, most - 1).join("")
    .replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/%/g, "&#37;")}…`;
};

function drawing(figure, width) {
  const spec = figures[figure.id];
  const view = chosen(spec);
  const methods = new Set(view.data.map((trace) => trace.method));
  const data = view.data.map((trace, i) => {
    const whole = styled(trace, i);
    if (trace.kind === "band" && methods.size > FEW_BANDS) whole.opacity = 0; // until its method is pointed at
    if (isHidden(figure, trace.method)) whole.visible = false;
    return whole;
  });
  const names = labelled(spec, view, figure, width);
  const most = width < 700 ? 14 : 24;
  const longest = Math.min(most, Math.max(0, ...names.map((each) => each.name.length)));
  const events = data.filter((trace) => trace.showlegend && trace.visible !== false).length;
  const axis = {
    gridcolor: css("grid"), linecolor: css("line"), zerolinecolor: css("line"), automargin: true,
    title: { standoff: 10 }, ticks: "",
  };
  const layout = merged({
    height: 340,
    margin: { l: 44, r: names.length ? 18 + 7.2 * longest : 14, t: events ? 34 : 14, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("ink"), family: "system-ui, sans-serif", size: width < 480 ? 11 : 12.5 },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
    hoverlabel: { bgcolor: css("paper"), bordercolor: css("line"), font: { color: css("ink") }, namelength: 40 },
    hovermode: "closest",
    hoverdistance: 30,
    xaxis: axis,
    yaxis: axis,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    showlegend: events > 0,
  }, coloured(merged(LAYOUTS[spec.name] || {}, view.layout)));
  if (typeof layout.level === "number") layout.shapes = [coloured(level(layout.level))];
  layout.height = Math.max(layout.height, 90 + LINE * names.length);
  if (width < 480) layout.margin.l = 34;
  if (page.paper) {
    layout.width = width;
    const tall = figure.matches(".wide, .group > figure") ? 300 : 240;
    if (width === PAPER_WIDTH) layout.height = Math.min(layout.height, Math.max(tall, 90 + LINE * names.length), 480);
  }
  return { data, layout, names: names.map((each) => ({ ...each, name: shortened(each.name, most) })) };
}

// Puts a name beside the end of each line, moved apart where they would overlap, as annotations that pictures keep.
function ends(plot, names) {
  const { xaxis, yaxis } = plot._fullLayout;
  const found = names.flatMap(({ place, method, name }) => {
    const { x, y } = plot.data[place];
    let last = -1;
    for (let i = 0; i < y.length; i += 1) {
      if (y[i] !== null && x[i] !== null && (last < 0 || x[i] >= x[last])) last = i;
    }
    const at = last < 0 ? NaN : yaxis.d2p(y[last]);
    return at >= -4 && at <= yaxis._length + 4 ? [{ method, name, at }] : [];
  }).sort((a, b) => a.at - b.at);
  const room = Math.min(LINE, yaxis._length / Math.max(found.length, 1));
  found.forEach((each, i) => { each.y = Math.max(each.at, i ? found[i - 1].y + room : room / 2); });
  for (let i = found.length - 1, floor = yaxis._length - room / 2; i >= 0; i -= 1, floor = found[i + 1].y - room) {
    found[i].y = Math.min(found[i].y, floor);
  }
  // Those below a crowd may have been pushed further than needed: pull each back towards its line.
  for (let i = 0; i < found.length; i += 1) {
    const above = i ? found[i - 1].y + room : room / 2;
    found[i].y = Math.max(above, Math.min(found[i].y, Math.max(found[i].at, above)));
  }
  plot.labels = found.map((each) => each.method);
  return found.map(({ method, name, y }) => ({
    xref: "paper", x: 1, xanchor: "left", xshift: 12, yref: "paper", y: 1 - y / yaxis._length, yanchor: "middle",
    text: name, showarrow: false, font: { color: colourOf(method), size: 12 }, captureevents: true, height: LINE,
  }));
}

async function drawInto(plot, figure, width) {
  const { data, layout, names } = drawing(figure, width);
  await Plotly.react(plot, data, layout, { responsive: !page.paper, displaylogo: false, displayModeBar: false });
  plot.names = names;
  await label(plot);
  return layout;
}

async function label(plot) {
  const annotations = plot.names && plot.names.length ? ends(plot, plot.names) : [];
  plot.labelling = true;
  if (annotations.length || (plot.layout.annotations || []).length) await Plotly.relayout(plot, { annotations });
  plot.labelling = false;
}

// A piece of line with the dashes and the marker of a method, beside its name.
function paintSwatches() {
  const dashes = { "-": "none", "--": "6 3", "-.": "6 2 1.5 2", ":": "1.5 2.5" };
  const markers = {
    o: "M10.5 6a3 3 0 1 0 6 0a3 3 0 1 0-6 0", s: "M10.8 3.3h5.4v5.4h-5.4z", D: "M13.5 2.2l3.8 3.8l-3.8 3.8l-3.8-3.8z",
    "^": "M13.5 2.4l3.8 6.6h-7.6z", v: "M13.5 9.6l3.8-6.6h-7.6z",
    P: "M12.3 2.4h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4z",
    X: "M11 2.6l2.5 2.2l2.5-2.2l1 1.1l-2.3 2.3l2.3 2.3l-1 1.1l-2.5-2.2l-2.5 2.2l-1-1.1l2.3-2.3l-2.3-2.3z",
    "*": "M13.5 1.8l1.2 2.9l3.1.2l-2.4 2l.8 3l-2.7-1.7l-2.7 1.7l.8-3l-2.4-2l3.1-.2z",
  };
  document.querySelectorAll("[data-swatch]").forEach((swatch) => {
    const [, , dash, marker] = looks[swatch.dataset.swatch];
    swatch.innerHTML = `<svg viewBox="0 0 27 12" aria-hidden="true"><path d="M0 6h27" stroke="currentColor" `
      + `stroke-width="2" stroke-dasharray="${dashes[dash]}" fill="none"/><path d="${markers[marker]}" `
      + `fill="currentColor"/></svg>`;
  });
}
