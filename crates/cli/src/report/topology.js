/* From idle to full: blue, amber, red. */
const RAMP = [[0, [91, 143, 201]], [0.35, [64, 160, 178]], [0.6, [232, 180, 60]], [0.8, [230, 120, 40]], [1, [200, 32, 45]]];
function heat(share) {
  if (share <= 0) return ink("--idle");
  const at = Math.min(share, 1);
  let nth = 1;
  while (nth + 1 < RAMP.length && at > RAMP[nth][0]) nth += 1;
  const [low, from] = RAMP[nth - 1];
  const [high, to] = RAMP[nth];
  const part = (at - low) / (high - low);
  return `rgb(${from.map((value, channel) => Math.round(value + (to[channel] - value) * part)).join(",")})`;
}

/* The network, coloured by how busy it was. */
function drawTopology(section, topology) {
  if (!topology) return;
  const details = element("div", { class: "details" }, element("p", { class: "note" }, "Click a link to keep its figures here."));
  const hot = element("ol", { class: "hot" });
  const picture = element("div", {});
  const stops = RAMP.map(([share, rgb]) => `rgb(${rgb.join(",")}) ${share * 100}%`).join(",");
  const legend = element("div", { class: "legend" }, "idle", element("i", { style: `background:linear-gradient(90deg,${stops})` }), "full");
  const views = choices(topology.views.map((view) => view.name), show);
  const side = element("div", { class: "side" }, element("h3", {}, "Busiest links"), hot, element("h3", {}, "Link"), details);
  section.append(
    element("div", { class: "top" }, element("h2", {}, "Links and how busy they were"), views.box, legend),
    element("p", { class: "note" }, topology.note),
    element("div", { class: "drawn" }, picture, side),
  );
  const where = positions(topology);

  function show(nth) {
    const view = topology.views[nth];
    const busy = (edge) => (view.loads.length ? Math.max(view.loads[edge][1], view.loads[edge][3]) : 0);
    const svg = drawn("svg", { viewBox: `0 0 1000 ${where.height}` });
    const lines = drawn("g", {});
    const hits = drawn("g", {});
    const marks = drawn("g", {});
    // Where lines are many, each is thinner.
    const thick = Math.min(1, Math.max(0.35, 300 / topology.edges.length));
    const order = topology.edges.map((_, edge) => edge).sort((a, b) => busy(a) - busy(b));
    for (const edge of order) {
      const path = route(where, topology.edges[edge]);
      const share = busy(edge);
      const look = { "stroke-width": (0.5 + (0.3 + 2.2 * share) * thick).toFixed(2), "stroke-opacity": share > 0 ? 0.4 + 0.5 * thick : 0.45 };
      lines.append(drawn("path", { class: "edge", d: path, stroke: heat(share), ...look }));
      hits.append(drawn("path", { class: "hit", d: path, "data-edge": edge }));
    }
    svg.append(lines, hits, places(topology, where), marks);
    hits.addEventListener("mousemove", (event) => {
      const lines = described(topology, view, Number(event.target.dataset.edge));
      showTip(event, lines.map(([name, value]) => (name ? `${name}: ${value}` : value)).join("\n"));
    });
    hits.addEventListener("mouseleave", hideTip);
    hits.addEventListener("click", (event) => choose(Number(event.target.dataset.edge)));
    picture.replaceChildren(svg);

    function choose(edge) {
      marks.replaceChildren(drawn("path", { class: "chosen", d: route(where, topology.edges[edge]) }));
      const list = element("dl", {});
      for (const [name, value] of described(topology, view, edge)) list.append(element("dt", {}, name || "link"), element("dd", {}, value));
      details.replaceChildren(list);
    }
    hot.replaceChildren();
    for (const spot of view.hot.slice(0, 10)) {
      const name = spot.parallel > 1 ? `${spot.name} (${whole(spot.parallel)} alike)` : spot.name;
      const bar = element("i", { style: `width:${Math.min(spot.busy, 1) * 100}%;background:${heat(spot.busy)}` });
      const item = element("li", { title: name }, bar, element("span", {}, name), element("span", {}, percent(spot.busy)));
      if (spot.edge !== null) item.addEventListener("click", () => choose(spot.edge));
      hot.append(item);
    }
    if (view.hot.length === 0) hot.append(element("li", {}, element("span", {}, "nothing looked at links")));
    count.edges = topology.edges.length;
  }
  views.pick(0);
  redraws.push(() => views.pick(Math.max(0, [...views.box.children].findIndex((button) => button.classList.contains("on")))));
}

/* Where every place is: rows one above the other, or circles around each other. */
function positions(topology) {
  const rows = topology.rows.map((row, nth) => ({ ...row, nth, at: topology.places.flatMap((place, index) => (place.row === nth ? [index] : [])) }));
  const points = [];
  if (topology.layout === "tiers") {
    const height = 60 + 135 * Math.max(rows.length - 1, 1);
    for (const row of rows) {
      const y = height - 30 - ((height - 60) * row.nth) / Math.max(rows.length - 1, 1);
      row.y = y;
      const step = 860 / row.at.length;
      row.at.forEach((index, nth) => (points[index] = { x: 128 + step * (nth + 0.5), y, width: Math.min(30, step * 0.72) }));
    }
    return { points, rows, height, round: false };
  }
  if (topology.layout === "grid") return grid(topology.sides, rows[0]);
  const height = 640;
  for (const row of rows) {
    const radius = rows.length === 1 ? 270 : 290 - (150 * row.nth) / (rows.length - 1);
    row.at.forEach((index, nth) => {
      const angle = (2 * Math.PI * (nth + 0.5)) / row.at.length - Math.PI / 2;
      points[index] = { x: 540 + radius * Math.cos(angle), y: 320 + radius * Math.sin(angle), width: 12 };
    });
    row.y = 30 + 36 * row.nth;
  }
  return { points, rows, height, round: true };
}

/* A torus: its first two dimensions as a grid, and the layers of a third side by side. */
function grid(sides, row) {
  const [wide, high, layers] = [sides[0], sides[1] ?? 1, sides[2] ?? 1];
  const beside = Math.ceil(Math.sqrt(layers));
  const below = Math.ceil(layers / beside);
  const step = Math.min(840 / (wide * beside + beside), Math.max(64, 620 / (high * below + below)));
  const points = row.at.map((_, nth) => {
    const [x, y, layer] = [nth % wide, Math.floor(nth / wide) % high, Math.floor(nth / (wide * high))];
    const [left, top] = [(layer % beside) * (wide + 1), Math.floor(layer / beside) * (high + 1)];
    return { x: 140 + step * (left + x + 0.5), y: 20 + step * (top + y + 0.7), width: Math.min(26, step * 0.5) };
  });
  row.y = 30;
  return { points, rows: [row], height: 40 + step * (below * (high + 1)), bend: step * 1.3 };
}

/* The line of an edge; within a row or a circle it bends inwards. */
function route(where, [from, to]) {
  const a = where.points[from];
  const b = where.points[to];
  const at = (point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`;
  if (where.bend) {
    // Neighbours are joined straight, and what goes around or between layers bends.
    const [x, y] = [b.x - a.x, b.y - a.y];
    const length = Math.hypot(x, y) || 1;
    if (length < where.bend) return `M${at(a)} L${at(b)}`;
    const by = Math.min(30, length * 0.12);
    return `M${at(a)} Q${at({ x: (a.x + b.x) / 2 - (y / length) * by, y: (a.y + b.y) / 2 + (x / length) * by })} ${at(b)}`;
  }
  if (where.round) {
    const pull = (one, centre) => one + (centre - one) * 0.35;
    const middle = { x: pull((a.x + b.x) / 2, 540), y: pull((a.y + b.y) / 2, 320) };
    return `M${at(a)} Q${at(middle)} ${at(b)}`;
  }
  if (a.y === b.y) return `M${at(a)} Q${at({ x: (a.x + b.x) / 2, y: a.y - 44 })} ${at(b)}`;
  const half = (a.y + b.y) / 2;
  return `M${at(a)} C${at({ x: a.x, y: half })} ${at({ x: b.x, y: half })} ${at(b)}`;
}

function places(topology, where) {
  const group = drawn("g", {});
  for (const row of where.rows) {
    group.append(
      drawn("text", { class: "row-name", x: 4, y: row.y - 3 }, drawn("tspan", { class: "count" }, whole(row.count)), ` ${row.name}`),
      drawn("text", { class: "row-name", x: 4, y: row.y + 11 }, row.each > 1 ? `${whole(row.each)} in a box` : ""),
    );
    const named = !where.round && row.at.length <= 16;
    row.at.forEach((index, nth) => {
      const point = where.points[index];
      const [left, width] = [point.x - point.width / 2, point.width];
      const box = drawn("rect", { class: "place", x: left.toFixed(1), y: point.y - 7, width: width.toFixed(1), height: 14, rx: 4 });
      box.addEventListener("mousemove", (event) => showTip(event, topology.places[index].name));
      box.addEventListener("mouseleave", hideTip);
      group.append(box);
      if (named && point.width >= 26) group.append(drawn("text", { class: "place-name", x: point.x.toFixed(1), y: point.y + 3.5 }, String(nth)));
    });
  }
  return group;
}

function described(topology, view, edge) {
  const [from, to, links, capacity] = topology.edges[edge];
  const [a, b] = [topology.places[from].name, topology.places[to].name];
  const lines = [["", `${a} ↔ ${b}`], ["links", `${whole(links)}, ${rate(capacity / links)} each`], ["capacity", rate(capacity)]];
  if (view.loads.length) {
    const [there, thereMost, back, backMost] = view.loads[edge];
    lines.push([`${a} → ${b}`, `${percent(there)} busy, at most ${percent(thereMost)}`]);
    lines.push([`${b} → ${a}`, `${percent(back)} busy, at most ${percent(backMost)}`]);
    if (view.hottest[edge]) lines.push(["busiest", view.hottest[edge]]);
  }
  return lines;
}
