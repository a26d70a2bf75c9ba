"use strict";
// Spans in lanes, and the memory under them: both look through the same window of time.

function timeline({ spans, names, memory, length, left_out, steps }) {
  const KINDS = ["gather", "forward", "backward", "reduce", "update", "host", "disk", "wait", "other"];
  const LANE_OF = { forward: "compute", backward: "compute" };
  const used = KINDS.filter((kind) => spans.some((span) => span.kind === kind));
  const whole = Math.max(1, length, ...memory.at.slice(-1));
  const view = { low: 0, high: whole };
  const time = (microseconds) => seconds(microseconds / 1e6);
  const LANE = 22;
  const ROW = 12;
  let byUnit = false;
  let lanes = [];
  let placed = [];

  // Each lane has as many rows as spans overlap in it.
  function arrange() {
    const groups = new Map();
    const title = (span) => (byUnit ? names[span.name] || "(root)" : LANE_OF[span.kind] ?? span.kind);
    if (!byUnit) for (const kind of used) groups.set(LANE_OF[kind] ?? kind, []);
    for (const span of spans) {
      const key = title(span);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(span);
    }
    let top = 24;
    placed = [];
    lanes = [...groups].map(([name, members]) => {
      const ends = [];
      for (const span of members) {
        let row = ends.findIndex((end) => end <= span.start + 1e-9);
        if (row < 0) row = ends.length < 4 ? ends.length : 3;
        ends[row] = span.start + span.length;
        placed.push({ span, lane: name, top: top + 2, row });
      }
      const rows = Math.max(1, ends.length);
      const height = rows === 1 ? LANE - 4 : rows * ROW;
      for (const each of placed) if (each.lane === name) each.height = rows === 1 ? LANE - 4 : ROW - 1;
      for (const each of placed) if (each.lane === name) each.top += each.row * ROW;
      const lane = { name, top, height: height + 4 };
      top += lane.height + 3;
      return lane;
    });
  }

  let frame;
  const toX = (at) => frame.left + ((at - view.low) / (view.high - view.low)) * (frame.width - frame.left - 8);
  const chart = plot("timeline of the units", (width) => {
    const left = Math.min(150, Math.max(68, width * 0.14));
    const last = lanes[lanes.length - 1];
    const height = (last ? last.top + last.height : 24) + 40;
    frame = { left, width, height };
    const parts = [];
    const fits = Math.floor((left - 8) / 6.6);
    const shorten = (name) => (name.length > fits ? "…" + name.slice(1 - fits) : name);
    for (const lane of lanes) {
      parts.push(s("line", { class: "grid", x1: 0, x2: width, y1: lane.top + lane.height + 1.5, y2: lane.top + lane.height + 1.5 }));
      parts.push(s("text", { class: "lane", x: 0, y: lane.top + Math.min(lane.height / 2, 40) + 4 }, s("title", {}, lane.name), shorten(lane.name)));
    }
    for (const at of ticks(view.low, view.high, Math.max(2, Math.floor((width - left) / 80)))) {
      parts.push(s("line", { class: "grid", x1: toX(at), x2: toX(at), y1: 18, y2: height - 34 }));
      parts.push(s("text", { y: height - 20, ...centred(toX(at), width) }, time(at)));
    }
    parts.push(s("text", { x: width - 8, y: height - 3, "text-anchor": "end" }, "time from the first event"));
    // One path for each kind: thousands of spans stay quick. Those of less than a pixel are drawn once a pixel.
    const paths = new Map(used.map((kind) => [kind, []]));
    const seen = new Map();
    for (const { span, top, height: tall } of placed) {
      const end = span.start + span.length;
      if (end < view.low || span.start > view.high) continue;
      const from = Math.max(left, toX(span.start));
      const to = Math.min(width - 8, Math.max(toX(end), from + 0.8));
      const key = `${span.kind} ${top}`;
      if (to - from < 1 && seen.get(key) === Math.floor(from)) continue;
      seen.set(key, Math.floor(from));
      const gap = to - from > 3 ? 0.6 : 0;
      paths.get(span.kind).push(`M${from.toFixed(1)} ${top}h${(to - from - gap).toFixed(1)}v${tall}H${from.toFixed(1)}z`);
    }
    for (const [kind, shapes] of paths) parts.push(s("path", { d: shapes.join(""), fill: color(kind), "data-kind": kind }));
    return { height, parts };
  });

  const states = Object.keys(memory.bytes);
  const totals = memory.at.map((_, at) => states.reduce((sum, name) => sum + memory.bytes[name][at], 0));
  const peak = totals.reduce((best, value, at) => (value > (totals[best] ?? -1) ? at : best), 0);
  const stack = plot("memory over time by state", (width) => {
    const height = 230;
    const left = frame?.left ?? 68;
    const drawn = axes({
      width, height, left, right: 8, top: 26,
      x: { ...view, format: time, label: "time from the first event" },
      y: { low: 0, high: (totals[peak] || 1) * 1.05, format: bytes, label: "bytes of this rank" },
    });
    const inside = (at) => Math.min(width - 8, Math.max(left, drawn.toX(at)));
    const floor = memory.at.map(() => 0);
    const areas = states.map((name) => {
      let upper = "";
      let lower = "";
      memory.at.forEach((at, index) => {
        const from = inside(at);
        const to = inside(memory.at[index + 1] ?? whole);
        const top = floor[index] + memory.bytes[name][index];
        upper += `L${from.toFixed(1)} ${drawn.toY(top).toFixed(1)}H${to.toFixed(1)}`;
        lower = `L${to.toFixed(1)} ${drawn.toY(floor[index]).toFixed(1)}H${from.toFixed(1)}` + lower;
        floor[index] = top;
      });
      return s("path", { d: (upper + lower).replace("L", "M") + "z", fill: color(name), "data-state": name });
    });
    return { height, parts: [...drawn.parts, ...areas] };
  });

  const show = () => { chart.redraw(); if (states.length) stack.redraw(); };
  function zoom(factor, around) {
    const span = Math.min(whole, Math.max(whole / 5000, (view.high - view.low) * factor));
    const part = (around - view.low) / (view.high - view.low);
    view.low = Math.min(whole - span, Math.max(0, around - part * span));
    view.high = view.low + span;
    show();
  }
  const move = (by) => {
    const span = view.high - view.low;
    view.low = Math.min(whole - span, Math.max(0, view.low + by));
    view.high = view.low + span;
    show();
  };
  const middle = () => (view.low + view.high) / 2;
  const timeAt = (event, picture) => {
    const place = event.clientX - picture.getBoundingClientRect().left;
    return view.low + ((place - frame.left) / (frame.width - frame.left - 8)) * (view.high - view.low);
  };

  function hit(event) {
    const box = chart.picture.getBoundingClientRect();
    const at = timeAt(event, chart.picture);
    const y = event.clientY - box.top;
    const slack = (2 * (view.high - view.low)) / frame.width;
    return placed.find(({ span, top, height }) =>
      y >= top && y <= top + height && at >= span.start - slack && at <= span.start + span.length + slack);
  }
  // A finger scrolls the page up and down and the window left and right; two fingers zoom.
  const fingers = new Map();
  for (const picture of [chart.picture, stack.picture]) {
    picture.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 300), timeAt(event, picture));
      else move((event.deltaX / frame.width) * (view.high - view.low));
    }, { passive: false });
    picture.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event.clientX);
      picture.setPointerCapture(event.pointerId);
    });
    const lift = (event) => fingers.delete(event.pointerId);
    picture.addEventListener("pointerup", lift);
    picture.addEventListener("pointercancel", lift);
    picture.addEventListener("pointerleave", hideTip);
    picture.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (before !== undefined) {
        const spread = () => { const [a, b] = [...fingers.values()]; return Math.max(20, Math.abs(a - b)); };
        const apart = fingers.size === 2 ? spread() : null;
        fingers.set(event.pointerId, event.clientX);
        hideTip();
        if (apart !== null) zoom(apart / spread(), middle());
        else move(((before - event.clientX) / (frame.width - frame.left)) * (view.high - view.low));
      } else if (picture === chart.picture) {
        const found = hit(event);
        if (!found) { hideTip(); return; }
        const { span } = found;
        showTip(event, names[span.name] || "(root)", [
          `${span.kind}: ${time(span.length)}`, `from ${time(span.start)}`,
          ...(span.bytes === null ? [] : [bytes(span.bytes)])]);
      } else {
        const at = timeAt(event, picture);
        let index = 0;
        while (index + 1 < memory.at.length && memory.at[index + 1] <= at) index += 1;
        showTip(event, `${time(memory.at[index])}: ${bytes(totals[index])}`,
          [...states].reverse().map((name) => `${name}: ${bytes(memory.bytes[name][index])}`));
      }
    });
  }

  const choose = (value) => {
    byUnit = value;
    kindButton.setAttribute("aria-pressed", !value);
    unitButton.setAttribute("aria-pressed", value);
    arrange();
    show();
  };
  const kindButton = h("button", { type: "button", "aria-pressed": "true", onclick: () => choose(false) }, "lanes by kind");
  const unitButton = h("button", { type: "button", "aria-pressed": "false", onclick: () => choose(true) }, "lanes by unit");
  const button = (name, label, onclick) => h("button", { type: "button", "aria-label": label, onclick }, name);
  const tools = () => [
    button("+", "zoom in", () => zoom(0.5, middle())), button("−", "zoom out", () => zoom(2, middle())),
    button("←", "earlier", () => move(-0.4 * (view.high - view.low))),
    button("→", "later", () => move(0.4 * (view.high - view.low))),
    button("all", "the whole time", () => { view.low = 0; view.high = whole; show(); })];
  arrange();
  const shown = steps.length === 0 ? "" : steps.length === 1 ? `Step ${exact(steps[0])} since the recording began. `
    : `Steps ${exact(steps[0])} to ${exact(steps[steps.length - 1])} since the recording began. `;
  const explanation = shown + "When each unit was gathered, computed, reduced and updated. Drag to move; zoom with the buttons, "
    + "two fingers, or Ctrl and the wheel; point at a span to read it."
    + (left_out ? ` Of ${exact(spans.length + left_out)} events the last ${exact(spans.length)} are drawn.` : "");
  const parts = [section("Timeline", explanation, legend(used.map((kind) => [kind, color(kind)])),
    h("div", { class: "tools" }, kindButton, unitButton, ...tools()), chart.picture)];
  if (states.length) {
    parts.push(section("Memory over time",
      `By state, one on the other. The highest point, ${bytes(totals[peak])}, is ${time(memory.at[peak])} after the first event.`
      + (data.counts_activations ? "" : " On a CPU nobody counts activations: they are not in here."),
      legend(states.map((name) => [name, color(name)])), stack.picture));
  }
  return parts;
}

if (data.timeline && data.timeline.spans.length) document.getElementById("timeline").append(...timeline(data.timeline));
else if (data.timeline) document.getElementById("timeline").append(h("p", { class: "note" }, "timeline.json holds no events."));
