/* Light or dark: as the system has it until somebody chooses. */
const redraws = [];
const system = matchMedia("(prefers-color-scheme: dark)");
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redraws.forEach((redraw) => redraw());
}
system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
setTheme(system.matches ? "dark" : "light");

drawAnswers(document.getElementById("answers"));
drawTopology(document.getElementById("topology"), data.topology);
drawTimeline(document.getElementById("timeline"), data.timelines);
drawComparison(document.getElementById("comparison"), data.comparison);
drawNumbers(document.getElementById("numbers"));
Object.assign(document.documentElement.dataset, { ready: "true", ...count });
