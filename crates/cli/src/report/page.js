"use strict";
// Draws what is in the data element. Everything that comes from the data becomes text, never markup.

window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
  document.querySelector("main").prepend(element("p", { class: "failed" }, `This report could not be drawn: ${event.message}`));
});

const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["--one", "--two", "--three", "--four", "--five", "--six", "--seven"];
const count = { edges: 0, slices: 0, pairs: 0 };

/* Elements, numbers and text */

function element(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}
function drawn(tag, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function colour(nth) {
  return getComputedStyle(document.documentElement).getPropertyValue(COLOURS[nth % COLOURS.length]).trim();
}
function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
/* A number with three or four digits, and what it is counted in. */
function scaled(value, units) {
  let nth = 0;
  while (nth + 1 < units.length && Math.abs(value) >= units[nth + 1][0]) nth += 1;
  const [size, unit] = units[nth];
  const shown = value / size;
  const digits = Math.abs(shown) >= 100 || Number.isInteger(shown) ? 0 : Math.abs(shown) >= 10 ? 1 : 2;
  return `${shown.toFixed(digits)} ${unit}`;
}
const time = (ps) => ps === 0 ? "0" : scaled(ps, [[1, "ps"], [1e3, "ns"], [1e6, "µs"], [1e9, "ms"], [1e12, "s"]]);
const bytes = (n) => scaled(n, [[1, "B"], [1024, "KiB"], [1048576, "MiB"], [1073741824, "GiB"], [1099511627776, "TiB"]]);
const rate = (n) => scaled(n, [[1, "B/s"], [1e3, "kB/s"], [1e6, "MB/s"], [1e9, "GB/s"], [1e12, "TB/s"], [1e15, "PB/s"]]);
const whole = (n) => n.toLocaleString("en-US");
const percent = (share) => `${(share * 100).toFixed(1)} %`;
const signed = (share) => `${share >= 0 ? "+" : "−"}${Math.abs(share * 100).toFixed(1)} %`;

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}
function hideTip() {
  tip.style.display = "none";
}

/* Buttons of which one is on. */
function choices(names, choose) {
  const box = element("div", { class: "choices" });
  const buttons = names.map((name, nth) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => pick(nth));
    return button;
  });
  function pick(nth) {
    buttons.forEach((button, other) => button.classList.toggle("on", other === nth));
    choose(nth);
  }
  if (names.length > 1) box.append(...buttons);
  return { box, pick };
}

function table(columns, rows) {
  const head = element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", {}, name))));
  const body = element("tbody", {});
  const isNumber = (cell) => /^[+−-]?\d|^[–0]?$/.test(String(cell));
  const words = columns.map((_, column) => rows.length > 0 && !rows.every((row) => isNumber(row[column])));
  words.forEach((word, column) => word && head.querySelectorAll("th")[column].classList.add("word"));
  for (const row of rows) {
    const cells = row.map((cell, column) => element("td", words[column] ? { class: "word" } : {}, String(cell)));
    body.append(element("tr", {}, ...cells));
  }
  return element("table", {}, head, body);
}

/* A button that puts a table on the clipboard, as text with tabs; from a file there may be no clipboard, and then it is selected. */
function copyButton(columns, rows) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => {
    const text = [columns, ...rows].map((row) => row.join("\t")).join("\n");
    const area = element("textarea", {}, text);
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    button.textContent = done ? "Copied" : "Not allowed here";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/* What is asked, and the answers side by side. */
function drawAnswers(section) {
  document.title = `${data.title} · Weft`;
  document.getElementById("kind").textContent = data.kind;
  document.getElementById("title").textContent = data.title;
  document.getElementById("summary").textContent = data.summary;
  document.getElementById("foot").textContent = data.foot;
  const facts = element("dl", { class: "facts" });
  for (const [name, value] of data.facts) facts.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  if (data.facts.length > 0) section.append(facts);
  if (data.answers.length === 0) return;
  const most = Math.max(...data.answers.map((answer) => answer.time_ps));
  const bars = element("div", { class: "bars" });
  const first = data.answers[0];
  let parts = null;
  data.answers.forEach((answer, nth) => {
    const bar = element("div", { class: "bar" });
    if (answer.parts.length > 0) {
      parts = element("div", { class: "parts" });
      answer.parts.forEach(([name, share], part) => {
        const look = `background:var(${COLOURS[part % 7]});opacity:${part < 7 ? 1 : 0.55}`;
        bar.append(element("i", { style: `width:${share * 100}%;${look}`, title: `${name}: ${percent(share)}` }));
        const swatch = element("span", { class: "swatch", style: look });
        parts.append(element("span", {}, swatch, `${name} ${percent(share)}`));
      });
    } else {
      bar.append(element("i", { style: `width:${most > 0 ? (answer.time_ps / most) * 100 : 0}%;background:var(${COLOURS[nth % 7]})` }));
    }
    const apart = answer.note || nth === 0 || first.time_ps === 0 ? answer.note : `${signed(answer.time_ps / first.time_ps - 1)} from ${first.name}`;
    bars.append(
      element("span", { class: "name" }, answer.name),
      bar,
      element("span", { class: "time" }, time(answer.time_ps)),
      element("span", { class: "apart" }, apart),
    );
  });
  section.append(bars);
  if (parts) section.append(parts);
}

/* Everything once more, as figures. */
function drawNumbers(section) {
  for (const { title, columns, rows } of data.tables) {
    section.append(element("div", { class: "top" }, element("h2", {}, title), copyButton(columns, rows)));
    section.append(element("div", { class: "scroll" }, table(columns, rows)), element("p", {}));
  }
}
