/* Who did what when: a canvas that is zoomed by the wheel and moved by dragging. */
function drawTimeline(section, timelines) {
  if (timelines.length === 0) return;
  const canvas = element("canvas", {});
  const key = element("div", { class: "key" });
  const note = element("p", { class: "note" });
  const reset = element("button", { type: "button" }, "Whole");
  const tabs = choices(timelines.map((timeline) => timeline.name), show);
  section.append(element("div", { class: "top" }, element("h2", {}, timelines[0].title), tabs.box, reset), note, key, canvas);
  const LABEL = 92;
  const AXIS = 24;
  let timeline = null;
  let lanes = [];
  let view = { from: 0, to: 1 };
  let open = null;
  let held = null;

  function show(nth) {
    timeline = timelines[nth];
    open = null;
    lanes = timeline.lanes.map((_, lane) => timeline.slices.filter((slice) => slice[0] === lane));
    note.textContent = timeline.note;
    const named = (kind, at) => element("span", {}, element("span", { class: "swatch", style: `background:var(${COLOURS[at % 7]})` }), kind);
    key.replaceChildren(...timeline.kinds.map(named));
    if (timeline.messages.length > 0) key.append(named("message sent", 3), named("message received", 4));
    view = { from: 0, to: timeline.end_ps };
    count.slices = timeline.slices.length;
    layOut();
  }

  /* How high every lane is: a lane that is open shows its messages one below the other. */
  let tops = [];
  let height = 0;
  const laneHeight = () => (lanes.length > 40 ? 13 : lanes.length > 20 ? 17 : 24);
  function layOut() {
    tops = [];
    height = AXIS;
    lanes.forEach((_, lane) => {
      tops.push(height);
      height += laneHeight() + (lane === open ? packed(lane).depth * 9 + 6 : 0);
    });
    canvas.style.height = `${height + 4}px`;
    paint();
  }
  /* Messages of a lane, each in the first line that is free. */
  function packed(lane) {
    const rank = timeline.ranks[lane];
    const mine = timeline.messages.filter((message) => message[2] === rank || message[3] === rank).sort((a, b) => a[0] - b[0]);
    const free = [];
    const placed = mine.map((message) => {
      let line = free.findIndex((until) => until <= message[0]);
      if (line < 0) line = free.length < 64 ? free.length : 63;
      free[line] = message[1];
      return { message, line, sent: message[2] === rank };
    });
    return { placed, depth: free.length };
  }

  const across = (ps, width) => LABEL + ((ps - view.from) / (view.to - view.from)) * (width - LABEL);
  function paint() {
    const width = canvas.clientWidth || 1100;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = (height + 4) * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height + 4);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const [soft, line, dark, light] = [ink("--soft"), ink("--line"), ink("--ink"), ink("--page")];
    const colours = COLOURS.map((_, nth) => colour(nth));
    axis(pen, width, soft, line);
    lanes.forEach((slices, lane) => {
      const top = tops[lane];
      const tall = laneHeight() - 3;
      pen.fillStyle = lane === open ? dark : soft;
      pen.textAlign = "right";
      const arrow = timeline.messages.length > 0 ? (lane === open ? "▾ " : "▸ ") : "";
      pen.fillText(arrow + timeline.lanes[lane], LABEL - 8, top + tall / 2);
      pen.save();
      pen.beginPath();
      pen.rect(LABEL, top, width - LABEL, tall + 3 + (lane === open ? packed(lane).depth * 9 + 6 : 0));
      pen.clip();
      pen.textAlign = "left";
      for (const slice of slices) {
        if (slice[2] < view.from || slice[1] > view.to) continue;
        const left = across(slice[1], width);
        const wide = across(slice[2], width) - left;
        pen.fillStyle = colours[slice[3] % 7];
        pen.globalAlpha = wide < 1 ? 0.5 : 1;
        pen.fillRect(left, top, wide > 3 ? wide - 0.8 : Math.max(wide, 0.6), tall);
        if (wide > 26 && tall > 12) {
          pen.fillStyle = light;
          const name = String(shortName(slice));
          if (pen.measureText(name).width < wide - 6) pen.fillText(name, left + 4, top + tall / 2 + 0.5);
        }
      }
      pen.globalAlpha = 1;
      if (lane === open) {
        for (const { message, line: at, sent } of packed(lane).placed) {
          const left = across(message[0], width);
          const wide = Math.max(across(message[1], width) - left, 1);
          pen.fillStyle = sent ? colours[3] : colours[4];
          pen.fillRect(left, top + tall + 5 + at * 9, wide, 7);
        }
      }
      pen.restore();
    });
  }
  function axis(pen, width, soft, line) {
    const span = view.to - view.from;
    const step = 10 ** Math.floor(Math.log10(span / 5));
    const each = [1, 2, 5, 10].map((times) => times * step).find((size) => span / size <= 9) ?? 10 * step;
    pen.textAlign = "center";
    for (let at = Math.ceil(view.from / each) * each; at <= view.to; at += each) {
      const x = across(at, width);
      pen.fillStyle = line;
      pen.fillRect(x, AXIS - 6, 1, height - AXIS + 6);
      pen.fillStyle = soft;
      if (x < width - 26) pen.fillText(time(at), x, 9);
    }
  }

  function shortName(slice) {
    return timeline.unit === "microbatch" ? (slice[4] < 0 ? "" : slice[4]) : timeline.unit === "step" ? slice[4] : `→ ${slice[9]}`;
  }
  function sliceText(slice) {
    const [lane, begin, end, kind, first, more, messages, sent, received, to, from] = slice;
    const lines = [`${timeline.lanes[lane]}: ${timeline.kinds[kind]}`];
    if (timeline.unit === "microbatch") {
      if (first >= 0) lines.push(`microbatch ${first}${more > 0 ? `, chunk ${more}` : ""}`);
    } else if (timeline.unit === "step") {
      lines.push(more > 1 ? `steps ${first}–${first + more - 1}` : `step ${first}`);
    }
    const others = messages > 2 ? " and others" : "";
    if (to >= 0) lines.push(`sends ${bytes(sent)} to rank ${to}${others}`);
    if (from >= 0) lines.push(`receives ${bytes(received)} from rank ${from}${others}`);
    if (messages > 2) lines.push(`${whole(messages)} messages`);
    lines.push(`${time(begin)} – ${time(end)} (${time(end - begin)})`);
    return lines.join("\n");
  }
  function messageText(message) {
    const [begin, end, from, to, step, size, alike, reduces] = message;
    const several = alike > 1 ? `${whole(alike)} × ` : "";
    const ends = `rank ${from} → rank ${to}${reduces ? ", reduced there" : ""}`;
    return `${ends}\nstep ${step}: ${several}${bytes(size)}\n${time(begin)} – ${time(end)} (${time(end - begin)})`;
  }
  function under(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const lane = tops.findLastIndex((top) => y >= top);
    const ps = view.from + ((x - LABEL) / (box.width - LABEL)) * (view.to - view.from);
    return { x, y, lane, ps, width: box.width };
  }
  function found({ x, y, lane, ps, width }) {
    if (lane < 0 || x < LABEL) return null;
    const slack = ((view.to - view.from) / (width - LABEL)) * 1.5;
    if (lane === open && y > tops[lane] + laneHeight()) {
      const line = Math.floor((y - tops[lane] - laneHeight() - 2) / 9);
      const hit = packed(lane).placed.find((one) => one.line === line && one.message[0] - slack <= ps && ps <= one.message[1] + slack);
      return hit ? messageText(hit.message) : null;
    }
    const near = (by) => lanes[lane].find((slice) => slice[1] - by <= ps && ps <= slice[2] + by);
    const hit = near(0) ?? near(slack);
    return hit ? sliceText(hit) : null;
  }
  function clamp() {
    const span = Math.min(Math.max(view.to - view.from, 100), timeline.end_ps);
    view.from = Math.min(Math.max(view.from, 0), timeline.end_ps - span);
    view.to = view.from + span;
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { ps } = under(event);
    const factor = Math.exp(Math.max(-300, Math.min(300, event.deltaY)) * 0.0022);
    view = { from: ps - (ps - view.from) * factor, to: ps + (view.to - ps) * factor };
    clamp();
    paint();
    section.dataset.span = view.to - view.from;
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, view: { ...view }, moved: false };
    canvas.classList.add("held");
  });
  window.addEventListener("pointermove", (event) => {
    if (!held) return;
    const width = canvas.getBoundingClientRect().width - LABEL;
    const by = ((event.clientX - held.x) / width) * (held.view.to - held.view.from);
    held.moved ||= Math.abs(event.clientX - held.x) > 3;
    view = { from: held.view.from - by, to: held.view.to - by };
    clamp();
    paint();
  });
  window.addEventListener("pointerup", (event) => {
    if (held && !held.moved && event.target === canvas) {
      const { lane, y, x } = under(event);
      const near = lane >= 0 && (x < LABEL || y < tops[lane] + laneHeight());
      if (near && timeline.messages.length > 0) {
        open = open === lane ? null : lane;
        layOut();
      }
    }
    held = null;
    canvas.classList.remove("held");
  });
  canvas.addEventListener("mousemove", (event) => {
    const text = held ? null : found(under(event));
    if (text) showTip(event, text);
    else hideTip();
  });
  canvas.addEventListener("mouseleave", hideTip);
  const all = () => {
    view = { from: 0, to: timeline.end_ps };
    paint();
  };
  canvas.addEventListener("dblclick", all);
  reset.addEventListener("click", all);
  window.addEventListener("resize", paint);
  redraws.push(paint);
  tabs.pick(0);
}
