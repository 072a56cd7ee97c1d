// The controls of the page: axes, sorting of tables. The charts are drawn by charts.js.

const holders = [...document.querySelectorAll("[data-chart]")];
function draw(holder) {
  charts.get(holder)?.plot.destroy();
  charts.delete(holder);
  holder.replaceChildren();
  holder.drawn = holder.clientWidth;
  drawCurve(holder, data.charts[holder.dataset.chart]);
}
const drawAll = () => holders.filter(holder => holder.drawn).forEach(draw);
const drawIfResized = holder => { if (holder.clientWidth !== holder.drawn) draw(holder); };
// Drawing changes sizes, so it waits for the next frame.
const resized = new ResizeObserver(entries => requestAnimationFrame(() => entries.forEach(({target}) => drawIfResized(target))));
holders.forEach(holder => resized.observe(holder));
dark.addEventListener("change", drawAll);

function control(label, input) {
  const whole = document.createElement("label");
  whole.append(...(input.type === "checkbox" ? [input, ` ${label}`] : [`${label} `, input]));
  return whole;
}
const bars = [...document.querySelectorAll(".axes")];
function fillBars() {
  for (const bar of bars) {
    const select = document.createElement("select"), reset = document.createElement("button");
    const known = Object.keys(overs).filter(over => data.grids.some(grid => grid[over]));
    select.append(...known.map(over => new Option(overs[over][0], over)));
    select.value = overOf(data.charts.flatMap(chart => chart.lines));
    select.onchange = () => changed({x: select.value});
    const boxes = [["logX", "log x"], ["logY", "log y"]].map(([key, label]) => {
      const box = Object.assign(document.createElement("input"), {type: "checkbox", checked: state[key], name: key});
      box.onchange = () => changed({[key]: box.checked});
      return control(label, box);
    });
    reset.textContent = "show all";
    reset.onclick = () => changed({zoom: {}, off: []});
    bar.replaceChildren(control("x axis", select), ...boxes, reset);
  }
}
function changed(choice) { Object.assign(state, choice); fillBars(); drawAll(); }
fillBars();

holders.forEach(drawIfResized);

// Headings become buttons here, so that without scripts nothing looks clickable.
for (const head of document.querySelectorAll("thead th")) {
  const table = head.closest("table"), column = head.cellIndex, button = document.createElement("button");
  if (!head.textContent || table.tBodies[0].rows.length < 2) continue;
  button.append(...head.childNodes); head.append(button);
  button.onclick = () => {
    const up = head.ariaSort !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
    head.ariaSort = up ? "ascending" : "descending";
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const gone = row => row.cells[column].textContent === "–";
    const order = (a, b) => key(a) - key(b) || String(key(a)).localeCompare(key(b), undefined, {numeric: true});
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(
      (a, b) => gone(a) - gone(b) || (up ? order(a, b) : order(b, a))));
  };
}
