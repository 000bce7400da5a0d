// What the reader does: look, choose, point, save, print.
// One drawing of a figure after the other; the last one asked for stays.
function draw(figure) {
  const plot = figure.querySelector(".plot");
  const first = !("drawn" in figure.dataset);
  figure.dataset.drawn = figures[figure.id].view;
  plot.job = (plot.job || Promise.resolve()).then(async () => {
    const { height } = await drawInto(plot, figure, page.paper ? PAPER_WIDTH : figure.clientWidth);
    plot.style.height = `${height}px`;
    if (first) listen(figure, plot);
  });
  return plot.job;
}

function listen(figure, plot) {
  plot.on("plotly_hover", ({ points: [point] }) => point && point.data.meta && highlight(figure, point.data.meta));
  plot.on("plotly_unhover", () => highlight(figure, null));
  plot.on("plotly_relayout", () => { if (!plot.labelling) label(plot); });
  plot.addEventListener("mouseover", (event) => {
    const note = event.target.closest(".annotation");
    if (note) highlight(figure, plot.labels[Number(note.dataset.index)]);
  });
  plot.addEventListener("mouseout", (event) => event.target.closest(".annotation") && highlight(figure, null));
}

// Others fade in all figures of the section; only what is on the screen changes, nothing is drawn again.
function highlight(node, method) {
  document.querySelectorAll(`#${sectionOf(node)} figure[data-drawn] .plot`).forEach((plot) => {
    const there = method && plot.data && plot.data.some((trace) => trace.meta === method && trace.visible !== false);
    (plot.data || []).forEach((trace) => {
      plot.querySelectorAll(`.trace${trace.uid}`).forEach((each) => {
        each.classList.toggle("faded", Boolean(there && trace.meta && trace.meta !== method && trace.opacity !== 0));
        each.classList.toggle("lit", Boolean(there && trace.meta === method));
      });
    });
    plot.querySelectorAll(".annotation").forEach((each) => {
      const own = (plot.labels || [])[Number(each.dataset.index)];
      each.classList.toggle("faded", Boolean(there && own && own !== method));
    });
  });
}

const drawn = () => [...document.querySelectorAll("figure[data-drawn]")];
const open = (figure) => !figure.closest("details.figures:not([open])");

// Those in sight first; the others when there is time, so that printing finds them.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !("drawn" in entry.target.dataset)) draw(entry.target);
  }
}, { rootMargin: "300px" });
document.querySelectorAll("figure").forEach((figure) => seen.observe(figure));

const later = window.requestIdleCallback || ((work) => setTimeout(work, 30));
async function drawRest() {
  const next = [...document.querySelectorAll("figure:not([data-drawn])")].find(open);
  if (!next) {
    await Promise.all(drawn().map((figure) => figure.querySelector(".plot").job));
    document.documentElement.dataset.ready = "yes";
    return;
  }
  await draw(next);
  later(drawRest);
}
later(drawRest);
document.querySelectorAll("details.figures").forEach((box) => box.addEventListener("toggle", () => later(drawRest)));

paintSwatches();
NIGHT.addEventListener("change", () => drawn().forEach(draw));
let wide = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== wide) drawn().forEach(draw); // names at the ends of lines need room
  wide = innerWidth;
});

document.querySelectorAll(".switch").forEach((box) => box.addEventListener("change", (event) => {
  const figure = box.closest("figure");
  const spec = figures[figure.id];
  const places = spec.view.split(" ");
  places[Number(box.dataset.place)] = event.target.value;
  spec.view = places.join(" ");
  draw(figure);
}));

document.querySelectorAll(".methods").forEach((box) => {
  box.addEventListener("change", () => {
    const section = sectionOf(box);
    page.hidden[section] = new Set([...box.querySelectorAll("input:not(:checked)")].map((input) => input.value));
    document.querySelectorAll(`#${section} figure[data-drawn]`).forEach(draw);
  });
});
const nameOf = (node) => node.dataset.method || node.querySelector("input").value;
document.querySelectorAll(".methods label, tr[data-method]").forEach((node) => {
  for (const kind of ["mouseenter", "focusin"]) node.addEventListener(kind, () => highlight(node, nameOf(node)));
  for (const kind of ["mouseleave", "focusout"]) node.addEventListener(kind, () => highlight(node, null));
});

// Numbers as text for a spreadsheet; a text that would be a formula there stays a text.
const cell = (value) => {
  if (value === null || value === undefined) return "";
  const text = String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
};
const plain = (text) => new DOMParser().parseFromString(String(text), "text/html").documentElement.textContent;

const SILENT = ["band", "work", "attacks"]; // what says in lines and areas what others say in numbers

// A place on an axis whose places all have names is that name.
const named = ({ tickvals, ticktext, type } = {}) => {
  const all = tickvals && ticktext && type !== "log" && tickvals.every((each, i) => each === i);
  return (value) => (all && value in ticktext ? plain(ticktext[value]) : value);
};

function numbers(figure) {
  const { data, layout } = chosen(figures[figure.id]);
  const usual = LAYOUTS[figures[figure.id].name] || {};
  const title = (name, other) => plain((layout[name]?.title || usual[name]?.title || {}).text || other);
  const all = data.filter((trace) => !SILENT.includes(trace.kind) && trace.visible !== false && !isHidden(figure, trace.method));
  if (all.some((trace) => trace.z)) {
    const [{ x, y, z }] = all;
    const columns = x || z[0].map((_, i) => i);
    return [["", ...columns.map(plain)], ...z.map((row, i) => [y ? plain(y[i]) : i, ...row])];
  }
  const extra = [...new Set(all.flatMap((trace) => trace.columns || []))];
  const several = all.some((trace) => trace.text);
  const [across, up] = [named(layout.xaxis), named(layout.yaxis)];
  const rows = all.flatMap((trace) => (trace.x || []).map((x, i) => {
    const own = (trace.customdata || [])[i];
    const more = Array.isArray(own) ? own : [own];
    const by = Object.fromEntries((trace.columns || []).map((name, j) => [name, more[j]]));
    const words = several ? [trace.text ? plain(trace.text[i].replace(/<br>/g, "; ")) : ""] : [];
    const who = trace.method ?? plain(trace.name ?? "");
    return [who, trace.kind, across(x), up(trace.y[i]), ...extra.map((name) => by[name]), ...words];
  })).filter((row) => row[2] !== null || row[3] !== null);
  return [["series", "kind", title("xaxis", "x"), title("yaxis", "y"), ...extra, ...(several ? ["about"] : [])], ...rows];
}

function save(name, content) {
  const link = document.createElement("a");
  link.href = content;
  link.download = name;
  link.click();
}

// White paper and a fixed size, whatever the screen is.
async function picture(figure) {
  const off = document.createElement("div");
  off.style.cssText = "position: fixed; left: -5000px; top: 0;";
  document.body.append(off);
  page.paper = true;
  document.documentElement.classList.add("printing");
  try {
    const layout = await drawInto(off, figure, PICTURE_WIDTH);
    await Plotly.relayout(off, {
      paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", "margin.t": layout.margin.t + 34, height: layout.height + 34,
      title: { text: figures[figure.id].title, x: 0.01, xanchor: "left", y: 1, yanchor: "top", pad: { t: 12 }, font: { size: 16 } },
    });
    return await Plotly.toImage(off, { format: "png", width: PICTURE_WIDTH, height: layout.height + 34, scale: 2 });
  } finally {
    page.paper = false;
    document.documentElement.classList.remove("printing");
    Plotly.purge(off);
    off.remove();
  }
}

document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", async () => {
  const figure = button.closest("figure");
  const name = `fedhist-${figure.id}.${button.dataset.save}`;
  if (button.dataset.save === "png") {
    save(name, await picture(figure));
    return;
  }
  const text = numbers(figure).map((row) => row.map(cell).join(",")).join("\r\n");
  const url = URL.createObjectURL(new Blob([`\ufeff${text}\r\n`], { type: "text/csv;charset=utf-8" }));
  save(name, url);
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}));

document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => {
  const code = button.previousElementSibling;
  getSelection().selectAllChildren(code);
  const done = navigator.clipboard ? navigator.clipboard.writeText(code.textContent) : Promise.reject(new Error());
  done.then(() => { button.textContent = "copied"; }, () => { button.textContent = "selected: press Ctrl+C"; });
}));

// A cue on tables that are wider than the page.
const widths = new ResizeObserver((entries) => entries.forEach(({ target }) => cue(target)));
const cue = (box) => {
  const more = box.scrollWidth - box.clientWidth - box.scrollLeft > 8;
  if (more) box.dataset.wider = "";
  else delete box.dataset.wider;
};
document.querySelectorAll(".scroll").forEach((box) => {
  widths.observe(box);
  box.addEventListener("scroll", () => cue(box), { passive: true });
});

// Where the reader is, in the contents.
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const places = [...links.keys()].map((id) => document.getElementById(id)).filter(Boolean);
let asked = false;
function here() {
  asked = false;
  const now = places.filter((place) => place.getClientRects().length && place.getBoundingClientRect().top < 140).pop();
  links.forEach((link, id) => {
    if (now && id === now.id) link.setAttribute("aria-current", "location");
    else link.removeAttribute("aria-current");
    link.classList.toggle("here", Boolean(now && id === now.id));
  });
}
addEventListener("scroll", () => {
  if (!asked) requestAnimationFrame(here);
  asked = true;
}, { passive: true });

addEventListener("beforeprint", () => {
  page.paper = true;
  document.documentElement.classList.add("printing"); // light colours, before the browser has changed to paper
  document.querySelectorAll("figure").forEach((figure) => open(figure) && draw(figure));
});
addEventListener("afterprint", () => {
  page.paper = false;
  document.documentElement.classList.remove("printing");
  drawn().forEach(draw);
});
