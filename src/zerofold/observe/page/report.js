"use strict";
// The page of a run. What is missing is said, not drawn empty.

const FAR_OFF = 5;  // percent; beyond it a prediction is marked

function facts() {
  const { facts: f } = data;
  const shown = [
    ["loss", number(f.loss)],
    ["validation loss", number(f.validation_loss)],
    ["tokens/s, median", count(f.median_tokens_per_second === null ? null : Math.round(f.median_tokens_per_second))],
    ["model FLOPs used", f.mfu === null ? DASH : (100 * f.mfu).toFixed(1) + "%"],
    ["steps", exact(f.step)],
    ["tokens", count(f.tokens)],
    ["time", seconds(f.seconds)],
    ["peak on the device" + (data.counts_activations ? "" : ", without activations"), bytes(f.peak_device_bytes)],
  ].filter(([, value]) => value !== DASH);
  if (f.skipped_steps) shown.push(["skipped steps", exact(f.skipped_steps)]);
  return h("dl", { class: "facts" }, shown.map(([name, value]) =>
    h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value))));
}

function lead() {
  const { facts: f } = data;
  const said = [
    f.psi === null ? null : `${count(f.psi)} parameters`,
    f.world === null ? null : `${exact(f.world)} ${f.world === 1 ? "rank" : "ranks"}`,
    f.stage === null ? null : `stage ${f.stage}`,
    f.precision, f.device,
  ].filter((each) => each !== null && each !== undefined);
  const unfinished = f.progress !== null && f.progress < 1 ? `, stopped at ${(100 * f.progress).toFixed(0)}%` : "";
  return h("p", { class: "lead" }, (said.join(" · ") || "a run of zerofold train") + unfinished);
}

function predicted() {
  if (!data.predicted.length) return null;
  const value = (line, which) => line.unit === "bytes" ? sized(line[which]) :
    { text: line.unit === "seconds" ? seconds(line[which]) : number(line[which]) };
  return section("Predicted and measured",
    "What the plan said before the run, and what the ledger saw. Off: predicted less measured, in percent of measured.",
    table([["line", "text"], ["predicted"], ["measured"], ["off"]],
      data.predicted.map((line) => [
        { text: line.line, small: line.where, class: "wrap" }, value(line, "predicted"), value(line, "measured"),
        { text: percent(line.off_percent), class: Math.abs(line.off_percent) > FAR_OFF ? "bad" : "" },
      ]), { id: "predicted" }));
}

function curves() {
  const { curves: c } = data;
  if (!c.step.length) return h("p", { class: "note" }, "metrics.jsonl holds no whole line yet: the run has shown no step.");
  const has = (key) => c[key].some((value) => value !== null);
  const marks = data.non_finite_losses ? c.loss.flatMap((value, at) => (value === null ? [at] : [])) : [];
  const losses = [{ name: "training", values: c.loss, paint: "var(--parameters)" }];
  if (has("validation_loss"))
    losses.push({ name: "validation", values: changesOf(c.validation_loss), paint: "var(--checkpoints)", dots: true });
  const loss = section("Loss", null, has("loss") || has("validation_loss") ? [
    legend(losses.map(({ name, paint }) => [name, paint])),
    lineChart({ label: "loss over steps", x: c.step, xLabel: "step", yLabel: "loss (nats)", series: losses, format: number, marks }),
  ] : null, data.non_finite_losses ? h("p", { class: "note" },
    `${data.non_finite_losses} of the lines have a loss that is no number (marked ▲).`) : null);
  const speed = section("Throughput", null, has("tokens_per_second") ? [
    legend([["all ranks together", "var(--optimizer)"]]),
    lineChart({
      label: "tokens a second over steps", x: c.step, xLabel: "step", yLabel: "tokens/s", format: count, fromZero: true,
      series: [{ name: "tokens/s", values: c.tokens_per_second, paint: "var(--optimizer)" }] }),
  ] : null);
  return h("div", { class: "two" }, loss, speed);
}

// Lines repeat the latest validation loss; a point is drawn where it changed.
const changesOf = (values) => values.map((value, at) => (value === values[at - 1] ? null : value));

function timeBar() {
  if (!data.time) return null;
  const { parts, rest, step } = data.time;
  const shown = Object.entries(parts).filter(([, value]) => value > 0);
  if (rest > 0) shown.push(["rest", rest]);
  const whole = shown.reduce((sum, [, value]) => sum + value, 0);
  const share = (value) => (whole ? ((100 * value) / whole).toFixed(1) + "%" : DASH);
  const MEANS = {
    compute: "forward and backward", gather: "waiting for parameters", reduce: "waiting for gradients",
    host: "waiting for the host", disk: "waiting for the disk", update: "the optimizer's step",
    other: "waiting for the norm and other agreements", rest: "claimed by none of them",
  };
  return section("Where the time went",
    `The mean step took ${seconds(step)}. Communication that runs behind compute takes no time here.`,
    stackedBar(shown.map(([name, value]) => [name, value, color(name), `${seconds(value)}, ${share(value)}`]), whole || 1),
    table([["", "text"], ["a step"], ["share"]], shown.map(([name, value]) => [
      { text: name, small: MEANS[name], paint: color(name), class: "wrap" }, seconds(value), share(value)]),
      { id: "time" }));
}

function communication() {
  if (!data.communication.length) return null;
  const largest = Math.max(1, ...data.communication.flatMap((each) => [each.bytes_per_step, each.theory_bytes_per_step]));
  const bar = (value, paint) => h("div", { class: "bar", style: "height:9px;margin:1px 0" },
    h("i", { style: `background:${paint};width:${((100 * (value ?? 0)) / largest).toFixed(3)}%` }));
  // Of what would be less than a pixel there is no bar.
  const isSeen = (each) => Math.max(each.bytes_per_step ?? 0, each.theory_bytes_per_step ?? 0) >= largest / 500;
  const unseen = data.communication.filter((each) => !isSeen(each));
  const named = (each) => `${each.operation}${each.group ? `, ${each.group}` : ""}`;
  return section("Communication",
    "What this rank sent in a step, by collective, and what a ring would send by theory.",
    legend([["sent", "var(--parameters)"], ...(data.communication.some((each) => each.theory_bytes_per_step !== null) ? [["theory", "var(--rest)"]] : [])]),
    data.communication.filter(isSeen).map((each) => h("div", { style: "margin:0 0 8px" },
      h("div", { style: "font-size:13px" }, named(each)),
      bar(each.bytes_per_step, "var(--parameters)"),
      each.theory_bytes_per_step === null ? null : bar(each.theory_bytes_per_step, "var(--rest)"))),
    unseen.length ? h("p", { class: "explain" }, `Too little for a bar: ${unseen.map(named).join("; ")}.`) : null,
    table([["collective", "text"], ["group", "text"], ["calls a step"], ["sent a step"], ["theory"], ["off"]],
      data.communication.map((each) => [
        each.operation, each.group, exact(each.calls), sized(each.bytes_per_step), sized(each.theory_bytes_per_step),
        percent(each.off_percent)]), { id: "communication" }));
}

function held() {
  const columns = [];
  if (Object.keys(data.state_bytes).length) columns.push(["at the end", data.state_bytes]);
  if (Object.keys(data.peak_state_bytes).length) columns.push(["each at its own peak", data.peak_state_bytes]);
  const tiers = Object.entries(data.tier_bytes).filter(([, sizes]) => Object.keys(sizes).length);
  // Where all of it is in one memory, that memory holds what was shown already.
  const isSaid = (sizes) => Object.keys({ ...sizes, ...data.state_bytes })
    .every((name) => (sizes[name] ?? 0) === (data.state_bytes[name] ?? 0));
  for (const [tier, sizes] of tiers) if (!isSaid(sizes)) columns.push([`on ${tier}`, sizes]);
  const kept = Object.entries(data.peak_kept_bytes).map(([tier, sizes]) => [`for backward on ${tier}, peaks`, sizes]);
  columns.push(...kept);
  if (!columns.length) return null;
  const peaks = new Set([data.peak_state_bytes, ...kept.map(([, sizes]) => sizes)]);
  const names = [...new Set(columns.flatMap(([, sizes]) => Object.keys(sizes)))];
  const total = (sizes) => Object.values(sizes).reduce((sum, value) => sum + value, 0);
  const largest = Math.max(1, ...columns.map(([, sizes]) => total(sizes)));
  const said = ["Bytes of this rank."];
  if (names.includes("cached")) said.push("Cached: memory of released units, kept for the next; buffers: those of reductions.");
  if (!data.counts_activations) said.push("On a CPU nobody counts activations: they are not in here.");
  return section("Memory by state", said.join(" "),
    legend(names.map((name) => [name, color(name)])),
    columns.map(([title, sizes]) => h("div", { style: "margin:0 0 8px" },
      h("div", { style: "font-size:13px" }, peaks.has(sizes) ? `${title}: of different moments, so there is no sum` : `${title}: ${bytes(total(sizes))}`),
      stackedBar(Object.entries(sizes).map(([name, value]) => [name, value, color(name), bytes(value)]), largest))),
    table([["state", "text"], ...columns.map(([title]) => [title])],
      names.map((name) => [name, ...columns.map(([, sizes]) => sized(sizes[name] ?? null))]), { id: "states" }));
}

function units() {
  if (!data.units.length) return null;
  return section(null, null, h("details", {}, h("summary", {}, `Units (${exact(data.units.length)})`),
    table([["unit", "text"], ["parameters"], ["states"], ["sent"]], data.units.map((unit) => [
      { text: unit.name || "(root)", class: "wrap" }, exact(unit.parameters), sized(unit.state_bytes), sized(unit.comm_bytes)]))));
}

function config() {
  const entries = Object.entries(data.config);
  if (!entries.length) return null;
  return section(null, null, h("details", {}, h("summary", {}, "Configuration"),
    table([["option", "text"], ["value", "text"]], entries.map(([key, value]) => [key, { text: value, class: "wrap" }]))));
}

page.append(h("h1", {}, data.run), lead(), ...data.missing.map((text) => h("p", { class: "note" }, text)), facts());
page.append(...[
  data.hints.length ? section("Hints", null, h("ul", { class: "hints" }, data.hints.map((hint) => h("li", {}, hint))))
    : data.looked_for_hints ? section("Hints", "None: nothing that was measured calls for another setting.") : null,
  predicted(), curves(), h("div", { id: "timeline" }),
  h("div", { class: "two" }, timeBar(), held()), communication(), units(), config(),
].filter(Boolean));
