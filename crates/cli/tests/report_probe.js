// Does what a reader does, and writes down what came of it. The test puts it at the end of a report.
(() => {
  const found = [];
  const check = (name, holds) => found.push(`${holds ? "ok" : "FAILED"} ${name}`);
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const mouse = (target, kind, x, y) => target.dispatchEvent(new PointerEvent(kind, { bubbles: true, cancelable: true, clientX: x, clientY: y }));
  check("ready", root.dataset.ready === "true");
  check("nothing of the data is markup", document.querySelectorAll("script").length === 3 && !document.querySelector("img, iframe, b, link"));

  const link = document.querySelector("#topology .hit");
  if (link) {
    mouse(link, "mousemove", 40, 40);
    check("hover tells a link", tip.style.display === "block" && /capacity: .*B\/s/.test(tip.textContent) && tip.textContent.includes("busy"));
    mouse(link, "click", 40, 40);
    check("click keeps it", document.querySelectorAll(".details dd").length >= 4 && document.querySelectorAll(".chosen").length === 1);
    const hot = document.querySelector(".hot li");
    mouse(hot, "click", 1, 1);
    check("a hot spot is found", document.querySelector(".details").textContent.includes(hot.lastElementChild.textContent));
    const busy = [...document.querySelectorAll("#topology .edge")].filter((edge) => edge.getAttribute("stroke").startsWith("rgb("));
    check("busy links are coloured", busy.length > 0);
    const views = document.querySelectorAll("#topology .choices button");
    if (views.length > 1) {
      mouse(views[1], "click", 1, 1);
      check("another fidelity is shown", views[1].classList.contains("on"));
    }
  }

  const canvas = document.querySelector("#timeline canvas");
  if (canvas) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [box.left + 130, box.top + 30];
    mouse(canvas, "mousemove", x, y);
    check("hover tells a slice", tip.style.display === "block" && /– \d+(\.\d+)? (ps|ns|µs|ms|s) \(/.test(tip.textContent));
    canvas.dispatchEvent(new WheelEvent("wheel", { bubbles: true, cancelable: true, clientX: x, clientY: y, deltaY: -300 }));
    const near = Number(document.getElementById("timeline").dataset.span);
    check("the wheel zooms", near > 0 && near < JSON.parse(document.getElementById("data").textContent).timelines[0].end_ps);
    mouse(canvas, "pointerdown", x, y);
    mouse(window, "pointermove", x - 60, y);
    mouse(canvas, "pointerup", x - 60, y);
    const tall = canvas.height;
    mouse(canvas, "pointerdown", box.left + 20, y);
    mouse(canvas, "pointerup", box.left + 20, y);
    if (JSON.parse(document.getElementById("data").textContent).timelines[0].messages.length > 0) check("a rank opens", canvas.height > tall);
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    check("something is painted", pixels.some((value) => value > 0));
  }

  const pairs = Number(root.dataset.pairs);
  if (pairs > 0) {
    check("every pair has a row", document.querySelectorAll("#comparison .scroll tbody tr").length === pairs);
    check("pairs are drawn", document.querySelectorAll("#comparison circle").length > 1);
  }
  const theme = root.dataset.theme;
  document.getElementById("theme").click();
  check("the theme changes", root.dataset.theme !== theme);
  check("no error", root.dataset.error === undefined);
  root.dataset.probe = found.join("; ");
})();
