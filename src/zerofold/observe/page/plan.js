"use strict";
// The page of a plan: a bar for every row, drawn again whenever a slider moves.

const PEAK = "device_peak";
const ELSEWHERE = ["host", "disk"];
const at = data.formulas ? formulas(data.formulas) : () => null;
const place = Object.fromEntries(data.sliders.map(({ name, value }) => [name, value]));
const bars = h("div", { id: "bars" });
const legendPlace = h("div");
const numbers = h("div");
// What was written for the start goes as soon as a number is another: times and what follows of them are not computed
// here. Which rows fit is written anew, and the command that tells the rest.
const start = { ...place };
const hasMoved = () => Object.keys(start).some((name) => start[name] !== place[name]);
const ofStart = (element) => { element.classList.add("of-start"); return element; };
const filled = (text) => Object.entries(place).reduce((said, [name, value]) => said.replace(`{${name}}`, value), text);
const command = h("pre", { id: "command" });
const copy = h("button", { type: "button", id: "copy", onclick: () => {
  getSelection().selectAllChildren(command); // where a page may not write to the clipboard, the reader does
  if (navigator.clipboard) navigator.clipboard.writeText(command.textContent).catch(() => {});
} }, "copy");
const moved = h("div", { id: "moved", role: "status", hidden: "" },
  h("p", { class: "note" }, `Bars, numbers and what fits follow the sliders. Times, a recommendation and its config with these numbers ${data.command ? "come from this command:" : "come from zerofold plan."}`), data.command ? command : null, data.command ? copy : null);
const title = h("h1", {}, data.title);
const fits = h("div", { id: "fits" });
const aside = h("p", { class: "explain", id: "aside", hidden: "" }, "The table goes on to the right: it scrolls in itself.");
const noteWidth = () => { const box = document.getElementById("numbers"); aside.hidden = !box || box.scrollWidth <= box.clientWidth + 1; };
const big = (value) => `${value}`.replace(/\B(?=(\d{3})+$)/g, ",");

// A slider that goes in steps of 1, 2, 3, 4, 6, 8, 12, …, and a field for any number.
function slider({ name, label, low, high }) {
  const stops = [low];
  for (let power = 1; power <= high; power *= 2)
    for (const stop of [power, power * 1.5]) if (Number.isInteger(stop) && stop > low && stop < high) stops.push(stop);
  stops.push(high);
  const nearest = (value) => stops.reduce((best, stop, index) =>
    (Math.abs(Math.log(stop / value)) < Math.abs(Math.log(stops[best] / value)) ? index : best), 0);
  const field = h("input", { type: "number", id: `field-${name}`, min: low, max: high, step: 1, value: place[name], inputmode: "numeric" });
  const range = h("input", {
    type: "range", id: `slider-${name}`, min: 0, max: stops.length - 1, step: 1, value: nearest(place[name]), "aria-label": label });
  range.setAttribute("aria-valuetext", place[name]);
  const set = (value) => { place[name] = value; range.setAttribute("aria-valuetext", value); show(); };
  range.addEventListener("input", () => { field.value = stops[range.value]; field.setCustomValidity(""); set(stops[range.value]); });
  field.addEventListener("input", () => {
    const value = Number(field.value);
    const good = Number.isInteger(value) && value >= low && value <= high;
    field.setCustomValidity(good ? "" : `a whole number from ${low} to ${high}`);
    if (!good) { field.reportValidity(); return; }
    range.value = nearest(value);
    set(value);
  });
  return h("div", { class: "slider" }, h("label", { for: `field-${name}` }, label, field), range);
}

function rowsHere() {
  const found = at(place);
  return data.rows.map((row) => {
    const values = found ? found[row.key] : Object.fromEntries(Object.entries(row.bytes).map(([line, value]) => [line, BigInt(value)]));
    if (!values) return { ...row, values: null, reached: values === null };
    const lines = Object.entries(values).filter(([line]) => line !== PEAK && !ELSEWHERE.includes(line));
    const sum = lines.reduce((total, [, value]) => total + value, 0n);
    return { ...row, values, lines, sum, peak: values[PEAK] ?? sum };
  });
}

// As `lacks` of zerofold.plan.predict: ties go to the even digit, as Python writes them.
const inGB = (value) => { const size = Number(value) / 1e9; return size % 1 === 0.25 ? `${Math.floor(size)}.2` : size.toFixed(1); };
function lacks(row) {
  if (!data.limits || !row.values) return "";
  const ranks = BigInt(Math.min(data.limits.per_node, place.devices)), need = row.values[PEAK];
  const host = ranks * row.values.host + (data.limits.one_memory ? ranks * need : 0n);
  const wanted = [["device memory", need, data.limits.device], ["host memory of a node", host, data.limits.host],
    ["disk of a node", ranks * row.values.disk, data.limits.disk]];
  return wanted.filter(([, needed, there]) => needed > BigInt(there))
    .map(([name, needed, there]) => `${name}: ${inGB(needed)} GB needed, ${inGB(there)} there`).join("; ");
}

function fitting(rows) {
  const good = rows.filter((row) => row.values && !lacks(row)), bad = rows.filter((row) => row.values && lacks(row));
  const impossible = rows.filter((row) => !row.values);
  return [
    h("p", { id: "fitting" }, good.length ? h("strong", {}, "Fits: ") : h("strong", {}, "No row of this page fits."), good.map((row) => row.said).join("; ")),
    bad.length ? h("ul", { id: "lacking", class: "explain" }, bad.map((row) => h("li", {}, `${row.said}: ${lacks(row)}`))) : null,
    impossible.length ? h("p", { class: "explain", id: "impossible" }, `Not possible with these numbers: ${impossible.map((row) => row.said).join("; ")}.`) : null,
  ].filter(Boolean);
}

function bar(row, scale, limit) {
  const part = (value) => `${((100 * Number(value)) / scale).toFixed(3)}%`;
  const name = h("div", { class: "name" }, row.name, row.detail ? h("small", {}, row.detail) : null);
  if (!row.values) {
    const why = row.reached ? `not possible with these numbers${row.needs ? `: ${row.needs}` : ""}` : "not computed for these numbers: ask zerofold plan";
    return h("div", { class: "row" }, name, h("div", { class: "track quiet" }, why), h("div", { class: "sum quiet" }, DASH));
  }
  const missing = lacks(row);
  const tooMuch = Boolean(missing) || (limit > 0 && Number(row.peak) > limit);
  const pieces = stackedBar(row.lines.map(([line, value]) => [line, Number(value), color(line), `${bytes(Number(value))}: ${big(value)} bytes`]), scale);
  return h("div", { class: row.recommended && !hasMoved() ? "row recommended" : "row", "data-row": row.key }, name,
    h("div", { class: "track" }, pieces,
      PEAK in row.values ? h("span", { class: "peak", style: `left:${part(row.peak)}` }) : null,
      limit > 0 && limit <= scale ? h("span", { class: "limit", style: `left:${part(limit)}` }) : null),
    h("div", { class: tooMuch ? "sum bad" : "sum", title: `${big(row.peak)} bytes` }, bytes(Number(row.peak)),
      tooMuch ? h("small", { title: missing }, "too much") : null));
}

function scaleUnder(scale) {
  const marks = ticks(0, scale, bars.clientWidth < 600 ? 3 : 6);
  const last = marks[marks.length - 1];
  return h("div", { class: "row scale", "aria-hidden": "true" }, h("div"), h("div", { class: "track" }, marks.map((mark) =>
    h("span", { style: `left:${((100 * mark) / scale).toFixed(3)}%`, class: mark === last && last > 0.9 * scale ? "last" : null }, bytes(mark)))), h("div"));
}

let inFull = false;
const fullButton = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
  inFull = !inFull;
  fullButton.setAttribute("aria-pressed", inFull);
  show();
} }, "every byte");

function show() {
  const rows = rowsHere();
  const known = rows.filter((row) => row.values);
  const limit = data.device_memory ?? 0;
  const largest = Math.max(1, ...known.map((row) => Math.max(Number(row.sum), Number(row.peak))));
  const scale = limit > largest && limit < 1.7 * largest ? limit * 1.02 : largest * 1.01;
  // A line that is nothing in every row needs no place.
  const used = new Set(known.flatMap((row) => row.lines.filter(([, value]) => value).map(([line]) => line)));
  const lines = [...new Set(known.flatMap((row) => row.lines.map(([line]) => line)))].filter((line) => used.has(line));
  const elsewhere = ELSEWHERE.filter((tier) => known.some((row) => row.values[tier]));
  legendPlace.replaceChildren(legend(lines.map((line) => [line, color(line)])));
  bars.replaceChildren(...rows.map((row) => bar(row, scale, limit)), scaleUnder(scale));
  const cell = (value) => value === undefined ? DASH :
    { text: inFull ? big(value) : bytes(Number(value)), title: `${big(value)} bytes` };
  moved.hidden = !hasMoved();
  for (const element of document.querySelectorAll(".of-start")) element.hidden = hasMoved();
  title.textContent = hasMoved() && data.title_at ? filled(data.title_at) : data.title;
  command.textContent = filled(data.command ?? "");
  if (data.limits) fits.replaceChildren(...fitting(rows));
  const peaks = known.some((row) => PEAK in row.values);
  // What decides stands first: the lines go out of sight on a small screen.
  numbers.replaceChildren(table([["row", "text"], [peaks ? "needed" : "sum"], ...lines.map((line) => [line]), ...elsewhere.map((tier) => [`on the ${tier}`])],
    known.map((row) => [{ text: row.name, small: row.detail, class: "wrap" }, cell(row.peak), ...lines.map((line) => cell(row.values[line])),
      ...elsewhere.map((tier) => cell(row.values[tier]))]), { id: "numbers" }));
  noteWidth();
}

const limitText = data.device_memory ? ` A device has ${bytes(data.device_memory)}: the dashed line, where it is in sight.` : "";
const peakText = data.rows.some((row) => PEAK in row.bytes) || data.formulas ?
  " The upright mark and the number are what a device needs, its peak and the reserve: not all parts are there at once." : "";
page.append(...[
  title, ofStart(h("p", { class: "lead" }, data.lead)),
  ...data.notes.map((note) => ofStart(h("p", { class: "explain" }, note))),
  ...data.left_out.map((note) => h("p", { class: "explain" }, note)),
  data.sliders.length ? section("What if", null, h("div", { class: "sliders" }, data.sliders.map(slider)), moved) : null,
  data.recommended ? ofStart(section("Recommended", null, data.chosen ? h("p", { id: "chosen" }, h("strong", {}, data.chosen)) : null,
    h("p", { id: "recommended" }, data.recommended),
    data.config.length ? h("pre", { id: "config" }, data.config.join("\n")) : null)) : null,
  data.limits ? section("What fits", null, fits) : null,
  section("Bytes of one rank", "Every way to keep a model's states, one on the other." + peakText + limitText, legendPlace, bars),
  section(null, null, h("details", { open: "" }, h("summary", {}, "Numbers"), h("div", { class: "tools" }, fullButton), aside, numbers)),
].filter(Boolean));
show();
window.addEventListener("resize", noteWidth);
