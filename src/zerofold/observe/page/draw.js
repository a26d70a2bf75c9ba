"use strict";
// What both pages draw with. Text that comes from files is only ever set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const DASH = "–";
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB"];

function threeDigits(value) {
  const size = Math.abs(value);
  return size >= 100 || value === 0 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}
function bytes(count) {
  if (count === null || count === undefined) return DASH;
  let power = 0;
  let value = count;
  while (Math.abs(value) >= 999.5 && power < UNITS.length - 1) { value /= 1000; power += 1; }
  return (power ? threeDigits(value) : value.toFixed(0)) + " " + UNITS[power];
}
function seconds(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  if (size >= 3600) return (value / 3600).toFixed(1) + " h";
  if (size >= 120) return (value / 60).toFixed(1) + " min";
  if (size >= 1) return threeDigits(value) + " s";
  if (size >= 1e-3) return threeDigits(value * 1e3) + " ms";
  return value === 0 ? "0 s" : threeDigits(value * 1e6) + " µs";
}
function count(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  for (const [power, letter] of [[1e15, "Q"], [1e12, "T"], [1e9, "B"], [1e6, "M"]])
    if (size >= power) return threeDigits(value / power) + " " + letter;
  return exact(value);
}
const exact = (value) =>
  value === null || value === undefined ? DASH : value.toLocaleString("en", { maximumFractionDigits: 4 });
const percent = (value) => {
  if (value === null || value === undefined) return DASH;
  const text = value.toFixed(1).replace(/^-(0\.0)$/, "$1");
  return (value > 0 && text !== "0.0" ? "+" : "") + text + "%";
};
const number = (value) => (value === null || value === undefined ? DASH : Number(value.toPrecision(4)).toString());
const COLORED = new Set(("parameters gradients optimizer gathered cached buffers checkpoints activations working logits other local workspaces reserve gather " +
  "forward backward reduce update host disk wait compute rest").split(" "));
// By the first word that has a colour: "fused buffers" has that of buffers.
const color = (name) => `var(--${name.toLowerCase().split(/[^a-z]+/).find((word) => COLORED.has(word)) ?? "other"})`;

function section(title, explanation, ...children) {
  return h("section", {}, title ? h("h2", {}, title) : null, explanation ? h("p", { class: "explain" }, explanation) : null, ...children);
}
function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(([name, paint]) =>
    h("li", {}, h("span", { class: "swatch", style: `background:${paint}` }), name)));
}
// Columns are [title, class]; rows hold texts, or {text, class, title, small, paint}: a line under it, a swatch before.
function table(columns, rows, attributes) {
  const cell = (value, at) => {
    const { text, class: extra, title, small, paint } = typeof value === "object" ? value : { text: value };
    return h("td", { class: [columns[at][1], extra].filter(Boolean).join(" ") || null, title },
      paint ? h("span", { class: "swatch", style: `background:${paint}` }) : null, text,
      small ? h("small", {}, small) : null);
  };
  return h("div", { class: "scroll", ...attributes }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map(([title, kind]) => h("th", { class: kind, scope: "col" }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}
const sized = (value) => ({ text: bytes(value), title: value === null ? null : exact(value) + " bytes" });

const tip = h("div", { class: "tip", hidden: "", role: "status" });
document.body.append(tip);
function showTip(event, title, lines) {
  tip.replaceChildren(h("b", {}, title), ...lines.map((line) => h("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.width - 8);
  const above = event.clientY + box.height + 24 > window.innerHeight;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (above ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
}
const hideTip = () => { tip.hidden = true; };
window.addEventListener("scroll", hideTip, { passive: true });

// Round numbers from low to high, about so many; `steps` are what one may count by.
function ticks(low, high, about, steps = [1, 2, 5, 10]) {
  const rough = (high - low) / Math.max(1, about);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * steps.find((each) => each * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step || 0);  // no -0
  return found;
}

// An <svg> that is drawn again whenever its width changes. `draw(width)` returns {height, parts}.
function plot(label, draw) {
  const picture = s("svg", { class: "plot", role: "img", "aria-label": label });
  const redraw = () => {
    const width = Math.max(200, picture.parentElement?.clientWidth ? picture.clientWidth : 0);
    const { height, parts } = draw(width);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("height", height);
    picture.replaceChildren(...parts.flat().filter(Boolean));
  };
  let width = 0;
  new ResizeObserver(() => {
    if (picture.clientWidth !== width) { width = picture.clientWidth; redraw(); }
  }).observe(picture);
  return { picture, redraw };
}

// A label around x, or before the edge where half of it would be cut off.
const centred = (x, width) => (x > width - 30 ? { x: width, "text-anchor": "end" } : { x, "text-anchor": "middle" });

// Axes of a plot: functions from values to pixels, and what to draw.
function axes({ width, height, x, y, left = 64, top = 22, right = 10, bottom = 40 }) {
  const toX = (value) => left + ((value - x.low) / (x.high - x.low || 1)) * (width - left - right);
  const toY = (value) => height - bottom - ((value - y.low) / (y.high - y.low || 1)) * (height - top - bottom);
  const parts = [];
  for (const value of ticks(y.low, y.high, 5)) {
    parts.push(s("line", { class: "grid", x1: left, x2: width - right, y1: toY(value), y2: toY(value) }));
    parts.push(s("text", { x: left - 8, y: toY(value) + 4, "text-anchor": "end" }, y.format(value)));
  }
  for (const value of ticks(x.low, x.high, Math.max(2, Math.floor(width / 90)))) {
    if (x.whole && !Number.isInteger(value)) continue;
    parts.push(s("text", { y: height - bottom + 17, ...centred(toX(value), width) }, x.format(value)));
  }
  parts.push(s("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  parts.push(s("text", { x: width - right, y: height - 4, "text-anchor": "end" }, x.label));
  parts.push(s("text", { x: 0, y: 12 }, y.label));
  return { toX, toY, parts, left, right, top, bottom };
}

// Lines over a common x; gaps where a value is null. Each of `series` is {name, values, paint, dots}.
function lineChart({ label, x, xLabel, yLabel, series, format, fromZero = false, marks = [] }) {
  const finite = series.flatMap((each) => each.values).filter((value) => value !== null);
  const extent = { low: Math.min(...finite, fromZero ? 0 : Infinity), high: Math.max(...finite) };
  const margin = (extent.high - extent.low || Math.abs(extent.high) || 1) * 0.06;
  const y = { low: fromZero ? 0 : extent.low - margin, high: extent.high + margin, format, label: yLabel };
  const xs = { low: x[0], high: x[x.length - 1] || 1, format: exact, label: xLabel, whole: true };
  if (xs.low === xs.high) { xs.low -= 1; xs.high += 1; }
  let frame;
  const drawn = plot(label, (width) => {
    const height = 220;
    frame = { ...axes({ width, height, x: xs, y }), width, height };
    const lines = series.map(({ values, paint, dots }) => {
      let path = "";
      let open = false;
      values.forEach((value, at) => {
        if (value === null) { open = open && dots; return; }
        path += `${open ? "L" : "M"}${frame.toX(x[at]).toFixed(1)} ${frame.toY(value).toFixed(1)}`;
        open = true;
      });
      const known = values.filter((value) => value !== null).length;
      const points = dots || known === 1 ? values.map((value, at) => value === null ? null :
        s("circle", { cx: frame.toX(x[at]), cy: frame.toY(value), r: 3, fill: paint })) : [];
      return [s("path", { d: path, fill: "none", stroke: paint, "stroke-width": 1.8, "stroke-linejoin": "round" }), points];
    });
    const broken = marks.map((at) => s("path", {
      d: `M${frame.toX(x[at])} ${height - frame.bottom - 9}l4 8h-8z`, fill: "var(--warn)" }));
    return { height, parts: [...frame.parts, ...lines.flat(2), ...broken, s("line", { class: "rule" })] };
  });
  drawn.picture.addEventListener("pointermove", (event) => {
    const box = drawn.picture.getBoundingClientRect();
    const place = event.clientX - box.left;
    let nearest = 0;
    x.forEach((value, at) => {
      if (Math.abs(frame.toX(value) - place) < Math.abs(frame.toX(x[nearest]) - place)) nearest = at;
    });
    const rule = drawn.picture.querySelector(".rule");
    const at = frame.toX(x[nearest]);
    fill(rule, { x1: at, x2: at, y1: frame.top, y2: frame.height - frame.bottom }, []);
    showTip(event, `${xLabel} ${exact(x[nearest])}`, series.map(({ name, values }) =>
      `${name}: ${marks.includes(nearest) && values[nearest] === null ? "not a number" : format(values[nearest])}`));
  });
  drawn.picture.addEventListener("pointerleave", () => {
    hideTip();
    fill(drawn.picture.querySelector(".rule"), { x1: -9, x2: -9 }, []);
  });
  return drawn.picture;
}

// One bar of parts that add up to `whole`; each part is [name, value, paint, text].
function stackedBar(parts, whole) {
  return h("div", { class: "bar" }, parts.map(([name, value, paint, text]) =>
    value > 0 ? h("i", {
      style: `background:${paint};width:${((100 * value) / whole).toFixed(4)}%`, "data-part": name,
      class: value > whole / 100 ? "wide" : null,  // a thin one would be all border
      onpointermove: (event) => showTip(event, name, [text]), onpointerleave: hideTip,
    }) : null));
}
