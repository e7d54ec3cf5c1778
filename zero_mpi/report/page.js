// The page around the charts: legend, axis, zoom, smoothing, read-outs, theme. All charts share one view.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];

const runs = data.runs.map((run) => ({
  ...run,
  // Where a step lies on an axis; between two columns in proportion, outside at the ends.
  placeOf(step, axis) {
    const after = Math.min(search(run.step, step), run.step.length - 1), before = Math.max(0, after - 1);
    if (after < 0) return 0;
    const [from, to] = [run.step[before], run.step[after]];
    const share = to > from ? Math.min(1, Math.max(0, (step - from) / (to - from))) : 1;
    return run[axis][before] + share * (run[axis][after] - run[axis][before]);
  },
}));
const charts = data.charts.map((spec) => new Chart(one(`[data-chart="${spec.id}"].chart`), spec, runs));
const view = { axis: "step", range: null, smooth: 0, hidden: new Set() };
let zoom = null; // the range that a reader chose; null: everything
let cursor = null; // the place under the pointer
let hovered = null; // and its chart
let waiting = false;

function wholeRange() {
  const seen = runs.filter((run) => !view.hidden.has(run.number) && run[view.axis] && run.step.length);
  const ends = seen.flatMap((run) => [run[view.axis][0], run[view.axis].at(-1)]);
  const low = Math.min(...ends), high = Math.max(...ends);
  return ends.length ? [low, high > low ? high : low + 1] : [0, 1];
}

function draw() {
  view.range = zoom || wholeRange();
  for (const chart of charts) chart.draw(view);
  one("#reset").hidden = !zoom;
  point();
}

function soon() {
  if (!waiting) requestAnimationFrame(() => { waiting = false; draw(); });
  waiting = true;
}

// ------------------------------------------------------------------------------------------- read-outs

function point() {
  for (const chart of charts) {
    const form = FORMS[chart.spec.form], many = chart.spec.series.length > 1;
    const values = chart.point(cursor).map(({ curve, value, low, high }) => {
      const item = document.createElement("span"), key = document.createElement("i");
      key.className = `key ${curve.run.colour} ${curve.series.dots ? "val" : "main"}`;
      const name = [runs.length > 1 ? curve.run.name : "", many ? curve.series.title : ""].filter(Boolean).join(" ") || (cursor === null ? "last" : "");
      const label = document.createElement("span"), number = document.createElement("b");
      label.textContent = name;
      number.textContent = value === null ? "not finite" : form(value);
      if (cursor !== null && value !== null && curve.hasBand && low < high) number.title = `${form(low)} to ${form(high)}`;
      item.append(key, label, number);
      return item;
    });
    chart.figure.querySelector(".readout").replaceChildren(...values);
    tip(chart);
  }
}

function tip(chart) {
  const box = chart.canvas.querySelector(".tip");
  box.hidden = cursor === null || chart !== hovered;
  if (box.hidden) return;
  const near = 7 * (view.range[1] - view.range[0]) / (chart.width - chart.left - RIGHT);
  const happened = runs.filter((run) => !view.hidden.has(run.number) && run[view.axis]).flatMap((run) =>
    run.marks.filter(([step]) => Math.abs(run.placeOf(step, view.axis) - cursor) < near)
      .map(([, , about]) => (runs.length > 1 ? `${run.name}: ${about}` : about)));
  const [name, form] = AXES[view.axis];
  const place = form === "seconds" ? FORMS.seconds(cursor) : grouped(cursor);
  box.replaceChildren(...[`${name} ${place}`, ...happened.slice(0, 5)].map((text) => {
    const line = document.createElement("div");
    line.textContent = text;
    return line;
  }));
  const x = chart.left + chart.across(cursor), right = x > chart.width / 2;
  box.style.left = right ? "auto" : `${x + 10}px`;
  box.style.right = right ? `${chart.width - x + 10}px` : "auto";
}

// ----------------------------------------------------------------------------------------- the pointer

function listen(chart) {
  const held = new Map(); // pointers that are down, and the place where each began
  let pinched = null;
  const area = chart.canvas;
  area.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held.set(event.pointerId, chart.place(event.clientX));
    if (event.pointerType === "mouse") area.setPointerCapture(event.pointerId);
    pinched = held.size === 2 ? [...held.entries()] : null;
    move(event);
  });
  function move(event) {
    hovered = chart;
    cursor = chart.place(event.clientX);
    if (pinched && held.has(event.pointerId)) return pinch(event);
    point();
    if (event.pointerType === "mouse" && held.has(event.pointerId)) chart.select(held.get(event.pointerId), cursor);
  }
  // What was under two fingers stays under them.
  function pinch(event) {
    const box = area.getBoundingClientRect(), inside = chart.width - chart.left - RIGHT;
    const mine = pinched.find(([id]) => id === event.pointerId);
    mine[2] = (event.clientX - box.left - chart.left) / inside;
    if (pinched.some((finger) => finger[2] === undefined)) return;
    const [[, a, p], [, b, q]] = pinched;
    if (Math.abs(p - q) < 0.02 || a === b) return;
    const width = Math.abs((a - b) / (p - q)), from = a - p * width;
    setZoom([from, from + width]);
  }
  area.addEventListener("pointermove", move);
  const end = (event) => {
    const began = held.get(event.pointerId);
    held.delete(event.pointerId);
    if (began === undefined || pinched) return void (pinched = held.size ? pinched : null);
    if (event.type !== "pointerup" || event.pointerType !== "mouse") return;
    const ended = chart.place(event.clientX);
    const pixels = Math.abs(chart.across(began) - chart.across(ended));
    if (pixels > 6) setZoom([Math.min(began, ended), Math.max(began, ended)]);
  };
  for (const name of ["pointerup", "pointercancel"]) area.addEventListener(name, end);
  area.addEventListener("pointerleave", () => { if (!held.size) leave(); });
  area.addEventListener("dblclick", () => setZoom(null));
  area.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomAround(chart.place(event.clientX), Math.exp(event.deltaY / 100));
  }, { passive: false });
  area.addEventListener("keydown", (event) => key(event, chart));
  area.addEventListener("blur", leave);
}

function leave() {
  cursor = hovered = null;
  point();
}

function key(event, chart) {
  const [low, high] = view.range, middle = cursor ?? (low + high) / 2, step = (high - low) / (event.shiftKey ? 10 : 100);
  const actions = {
    ArrowLeft: () => (cursor = Math.max(low, middle - step)),
    ArrowRight: () => (cursor = Math.min(high, middle + step)),
    "+": () => zoomAround(middle, 0.5),
    "=": () => zoomAround(middle, 0.5),
    "-": () => zoomAround(middle, 2),
    0: () => setZoom(null),
    Escape: () => setZoom(null),
  };
  if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  hovered = chart;
  actions[event.key]();
  point();
}

function zoomAround(place, factor) {
  const [low, high] = view.range;
  setZoom([place - (place - low) * factor, place + (high - place) * factor]);
}

function setZoom(range) {
  const [low, high] = wholeRange();
  if (range) range = [Math.max(low, range[0]), Math.min(high, range[1])];
  if (range && !(range[1] - range[0] > (high - low) * 1e-6)) return;
  zoom = range && (range[0] > low || range[1] < high) ? range : null;
  soon();
}

// -------------------------------------------------------------------------------------------- controls

const pressed = (button, on) => button.setAttribute("aria-pressed", String(on));

for (const chip of all(".chip")) {
  chip.addEventListener("click", () => {
    const number = Number(chip.dataset.run);
    view.hidden.has(number) ? view.hidden.delete(number) : view.hidden.add(number);
    pressed(chip, !view.hidden.has(number));
    soon();
  });
}
for (const button of all("[data-axis]")) {
  button.disabled = !runs.some((run) => run[button.dataset.axis]);
  button.addEventListener("click", () => {
    view.axis = button.dataset.axis;
    zoom = cursor = null;
    for (const other of all("[data-axis]")) pressed(other, other === button);
    soon();
  });
}
for (const chart of charts) {
  const button = chart.figure.querySelector("[data-log]");
  button?.addEventListener("click", () => {
    chart.log = !chart.log;
    pressed(button, chart.log);
    soon();
  });
  listen(chart);
}
one("#smooth").addEventListener("input", (event) => {
  view.smooth = event.target.value === "0" ? 0 : 1 - 0.5 * 0.02 ** (event.target.value / 100);
  soon();
});
one("#reset").addEventListener("click", () => setZoom(null));
one("#theme").addEventListener("click", () => {
  const dark = getComputedStyle(root).colorScheme === "dark" || (root.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
});
one("#only-differs")?.addEventListener("change", (event) => {
  one("#settings-table").classList.toggle("only-differs", event.target.checked);
});

root.classList.add("js");
const sizes = new ResizeObserver(soon);
for (const chart of charts) sizes.observe(chart.canvas);
draw();
