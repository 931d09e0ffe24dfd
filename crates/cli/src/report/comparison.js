/* What was predicted beside what was measured. */
function drawComparison(section, comparison) {
  if (!comparison) return;
  const columns = ["what", "measured", ...comparison.series.flatMap((name) => [name, "error"])];
  const pair = (value, measured) => (value === null ? ["–", "–"] : [micros(value), signed(value / measured - 1)]);
  const cells = (row) => [what(row), micros(row.measured), ...row.predicted.flatMap((value) => pair(value, row.measured))];
  const micros = shownAs(comparison);
  const rows = comparison.rows.map(cells);
  const sizes = comparison.rows.every((row) => row.bytes !== null);
  const groups = [...(sizes ? [] : ["all"]), ...new Set(comparison.rows.map((row) => row.group))];
  const box = element("div", {});
  const pick = element("select", {}, ...groups.map((name, nth) => element("option", { value: nth }, name)));
  pick.addEventListener("change", () => show(Number(pick.value)));
  const several = groups.length > (sizes ? 1 : 2);
  section.append(
    element("div", { class: "top" }, element("h2", {}, "Predicted and measured"), several ? pick : "", copyButton(columns, rows)),
    element("p", { class: "note" }, comparison.note),
    box,
    table(["error", "pairs", "median", "90 %"], comparison.errors.map((one) => [one.name, whole(one.pairs), percent(one.median), percent(one.p90)])),
    element("p", {}),
    element("div", { class: "scroll" }, table(columns, rows)),
  );
  count.pairs = comparison.rows.length;
  function show(nth) {
    box.replaceChildren(sizes ? overSize(comparison, groups[nth]) : overMeasured(comparison, groups[nth]));
  }
  show(0);
  redraws.push(() => show(several ? Number(pick.value) : 0));
}

/* Microseconds, or plain numbers. */
function shownAs(comparison) {
  return comparison.timed ? (us) => time(us * 1e6) : (value) => String(Number(value.toPrecision(4)));
}

/* An empty chart with logarithmic axes, and how to place points on it. */
function chart(xs, ys, xName, yName, xText, yText) {
  const [width, height, left, bottom, top, right] = [1000, 380, 76, 46, 14, 190];
  const range = (values) => {
    const some = values.filter((value) => value > 0).map(Math.log10);
    const [low, high] = some.length ? [Math.min(...some), Math.max(...some)] : [0, 1];
    return high - low < 0.1 ? [low - 0.5, high + 0.5] : [low - 0.04 * (high - low), high + 0.04 * (high - low)];
  };
  const [x, y] = [range(xs), range(ys)];
  const across = (value) => left + ((Math.log10(value) - x[0]) / (x[1] - x[0])) * (width - left - right);
  const up = (value) => height - bottom - ((Math.log10(value) - y[0]) / (y[1] - y[0])) * (height - bottom - top);
  const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}` });
  const ticks = (from, to, most) => {
    const all = [];
    for (let power = Math.ceil(from); power <= to; power += 1) all.push(10 ** power);
    const each = Math.ceil(all.length / most);
    return all.length < 2 ? [10 ** from, 10 ** ((from + to) / 2), 10 ** to] : all.filter((_, nth) => nth % each === 0);
  };
  const binary = xText === bytes ? sizesBetween(10 ** x[0], 10 ** x[1]) : ticks(x[0], x[1], 9);
  for (const value of binary) {
    svg.append(drawn("line", { class: "grid", x1: across(value), x2: across(value), y1: top, y2: height - bottom }));
    svg.append(drawn("text", { x: across(value), y: height - bottom + 16, "text-anchor": "middle" }, xText(value)));
  }
  for (const value of ticks(y[0], y[1], 8)) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: up(value), y2: up(value) }));
    svg.append(drawn("text", { x: left - 8, y: up(value) + 4, "text-anchor": "end" }, yText(value)));
  }
  svg.append(drawn("text", { class: "axis", x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, xName));
  const middle = (height - bottom) / 2;
  svg.append(drawn("text", { class: "axis", x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, yName));
  return { svg, across, up, right: width - right + 18, x, y };
}
function sizesBetween(low, high) {
  const all = [];
  for (let power = Math.ceil(Math.log2(low)); power <= Math.log2(high); power += 1) all.push(2 ** power);
  const each = Math.ceil(all.length / 9);
  return all.filter((_, nth) => nth % each === 0);
}

function overSize(comparison, group) {
  const rows = comparison.rows.filter((row) => row.group === group && row.bytes > 0).sort((a, b) => a.bytes - b.bytes);
  const values = rows.flatMap((row) => [row.measured, ...row.predicted.filter((value) => value !== null)]);
  const { svg, across, up, right } = chart(rows.map((row) => row.bytes), values, "size", "time", bytes, shownAs(comparison));
  comparison.series.forEach((name, nth) => {
    const told = rows.filter((row) => row.predicted[nth] !== null);
    const points = told.map((row) => `${across(row.bytes).toFixed(1)},${up(row.predicted[nth]).toFixed(1)}`);
    svg.append(drawn("polyline", { points: points.join(" "), fill: "none", stroke: colour(nth), "stroke-width": 2 }));
    svg.append(drawn("line", { x1: right, x2: right + 18, y1: 44 + 20 * nth, y2: 44 + 20 * nth, stroke: colour(nth), "stroke-width": 2 }));
    svg.append(drawn("text", { x: right + 24, y: 48 + 20 * nth }, name));
  });
  for (const row of rows) {
    svg.append(dot(comparison, row, across(row.bytes), up(row.measured), { r: 4, fill: ink("--ink"), "fill-opacity": 0.85 }));
  }
  svg.append(drawn("circle", { cx: right + 9, cy: 24, r: 4, fill: ink("--ink") }), drawn("text", { x: right + 24, y: 28 }, "measured"));
  return svg;
}

function overMeasured(comparison, group) {
  const rows = comparison.rows.filter((row) => group === "all" || row.group === group);
  const values = rows.flatMap((row) => [row.measured, ...row.predicted.filter((value) => value !== null)]);
  const show = shownAs(comparison);
  const { svg, across, up, right, x } = chart(values, values, "measured", "predicted", show, show);
  const [low, high] = [10 ** x[0], 10 ** x[1]];
  svg.append(drawn("line", { x1: across(low), y1: up(low), x2: across(high), y2: up(high), stroke: ink("--soft"), "stroke-dasharray": "5 4" }));
  comparison.series.forEach((name, nth) => {
    for (const row of rows) {
      if (row.predicted[nth] === null) continue;
      const look = { r: 3, fill: colour(nth), "fill-opacity": 0.6 };
      svg.append(dot(comparison, row, across(row.measured), up(row.predicted[nth]), look));
    }
    svg.append(drawn("circle", { cx: right + 9, cy: 24 + 20 * nth, r: 4, fill: colour(nth) }));
    svg.append(drawn("text", { x: right + 24, y: 28 + 20 * nth }, name));
  });
  return svg;
}

/* A point that tells its pair. */
function dot(comparison, row, x, y, look) {
  const circle = drawn("circle", { cx: x.toFixed(1), cy: y.toFixed(1), ...look });
  circle.addEventListener("mousemove", (event) => showTip(event, pairText(comparison, row)));
  circle.addEventListener("mouseleave", hideTip);
  return circle;
}
function what(row) {
  return row.bytes === null ? row.group : `${row.group}, ${bytes(row.bytes)}`;
}
function pairText(comparison, row) {
  const shown = shownAs(comparison);
  const lines = [what(row), `measured: ${shown(row.measured)}`];
  comparison.series.forEach((name, nth) => {
    const value = row.predicted[nth];
    if (value !== null) lines.push(`${name}: ${shown(value)} (${signed(value / row.measured - 1)})`);
  });
  return lines.join("\n");
}
