// Draws what plots.py has laid out, with Plotly, in the axis, scale, smoothing and colours that a reader asks for.
// Zoom, legend and the line under the pointer are Plotly's; here are only keys and fingers that move them.

const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const root = document.documentElement;
const figures = JSON.parse(one("#data").textContent);
const CONFIG = { responsive: true, displayModeBar: false, typesetMath: false, doubleClick: "autosize" };
const PAPER = 690; // pixels across a printed page

// The library is packed to a third of its size; the page's policy knows what comes out of it.
async function unpackPlotly() {
  const packed = Uint8Array.from(atob(one("#plotly").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// The colour of classes, light or dark, as Plotly takes it.
function colourOf(classes, paper) {
  const sample = one("#colour");
  sample.className = classes;
  sample.style.colorScheme = paper ? "light" : "";
  return getComputedStyle(sample).color;
}

const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;

// The mean of a point and its neighbours on both sides, which count less the further they are: by `keep` a point.
// Both sides, so that a falling curve is not drawn too late. Gaps stay gaps.
function smoothed(values, keep) {
  const sums = values.map(() => [0, 0]);
  for (const order of [1, -1]) {
    let sum = 0, weight = 0;
    for (let i = order > 0 ? 0 : values.length - 1; i >= 0 && i < values.length; i += order) {
      sums[i][0] += sum * keep;
      sums[i][1] += weight * keep;
      sum = sum * keep + (values[i] ?? 0);
      weight = weight * keep + (values[i] === null ? 0 : 1);
    }
  }
  return values.map((value, i) => (value === null ? null : (value + sums[i][0]) / (1 + sums[i][1])));
}

// What a reader has chosen in the controls above the curves.
const chosenAxis = () => one("[name=axis]:checked").value;
const chosenLogarithms = () => all("[name=log]:checked").map((box) => box.value);
const chosenSmoothing = () => Number(one("#smooth")?.value) && 1 - 0.5 * 0.02 ** (one("#smooth").value / 100);

// A trace as it is drawn: in its colour, and where its points lie on the chosen axis.
function drawn(trace, places, paper) {
  const color = colourOf(trace.meta.colour, paper);
  const marker = { ...trace.marker, color, line: { ...trace.marker?.line, color } };
  const line = trace.line && { ...trace.line, color };
  return { ...trace, x: places ? places[trace.meta.x][chosenAxis()] : trace.x, line, marker, fillcolor: color };
}

function draw(paper = false) {
  const style = getComputedStyle(document.body), keep = chosenSmoothing();
  for (const [id, { traces, layout, places, axes }] of Object.entries(figures)) {
    const plot = one(`#${id}-plot`), shown = traces.map((trace) => drawn(trace, places, paper));
    const isHidden = (i) => plot.data?.[i].visible === "legendonly";
    const shapes = shown.flatMap((trace, i) => !trace.meta.upright || isHidden(i) ? [] : trace.x.map((x) => ({
      type: "line", xref: "x", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "below",
      line: { color: trace.marker.color, width: 1, dash: "dot" },
    })));
    const soft = keep ? shown.filter((trace) => trace.meta.smooth).map((trace) => {
      const over = { ...trace, y: smoothed(trace.y, keep), showlegend: false, hoverinfo: "skip", hovertemplate: null };
      trace.opacity = 0.3;
      return over;
    }) : [];
    const made = {
      ...layout,
      shapes,
      width: paper ? PAPER : undefined,
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger on a curve scrolls the page
      font: { family: style.fontFamily, size: 12, color: paper ? "#000" : style.color },
      hoverlabel: { bgcolor: style.backgroundColor, bordercolor: style.color, align: "left" },
    };
    if (axes) {
      const text = axes[chosenAxis()], unifiedhovertitle = { text: `${text} %{x}` };
      made.xaxis = { ...layout.xaxis, title: { text }, unifiedhovertitle, uirevision: chosenAxis() };
      for (const axis of chosenLogarithms()) made[axis] = { ...made[axis], type: "log" };
    }
    Plotly.react(plot, [...shown, ...soft], made, CONFIG);
  }
}

// ------------------------------------------------------------------------------------- keys and fingers

function zoom(plot, place, factor) {
  const [low, high] = plot.layout.xaxis.range.map(Number);
  Plotly.relayout(plot, { "xaxis.range": [place - (place - low) * factor, place + (high - place) * factor] });
}

function reset(plot) {
  const axes = Object.keys(plot.layout).filter((name) => /^[xy]axis/.test(name) && !plot.layout[name].fixedrange);
  Plotly.relayout(plot, Object.fromEntries(axes.map((name) => [`${name}.autorange`, true])));
}

function listen(plot) {
  let cursor = null, spread = 0;
  plot.addEventListener("keydown", (event) => {
    const [low, high] = plot.layout.xaxis.range.map(Number);
    const place = Math.min(high, Math.max(low, cursor ?? (low + high) / 2));
    const move = (share) => Plotly.Fx.hover(plot, { xval: (cursor = place + share * (high - low)) }, "xy2");
    const actions = {
      ArrowLeft: () => move(-0.02), ArrowRight: () => move(0.02), "+": () => zoom(plot, place, 0.5),
      "-": () => zoom(plot, place, 2), 0: () => reset(plot), Escape: () => reset(plot),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  });
  const apart = (touches) => Math.abs(touches[0].clientX - touches[1].clientX);
  plot.addEventListener("touchstart", (event) => (spread = event.touches.length === 2 ? apart(event.touches) : 0));
  plot.addEventListener("touchmove", (event) => {
    if (!spread || event.touches.length !== 2) return;
    event.preventDefault();
    const [low, high] = plot.layout.xaxis.range.map(Number), now = Math.max(20, apart(event.touches));
    zoom(plot, (low + high) / 2, spread / now);
    spread = now;
  }, { passive: false });
}

// -------------------------------------------------------------------------------------------- controls

async function begin() {
  root.classList.add("js");
  one("#theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    draw();
  });
  if (!Object.keys(figures).length) return;
  await unpackPlotly();
  draw();
  if (figures.curves) {
    const plot = one("#curves-plot");
    listen(plot);
    one(".controls").addEventListener("input", () => draw());
    one("#reset").addEventListener("click", () => reset(plot));
    plot.on("plotly_restyle", () => draw()); // a run that is hidden hides its moments' lines
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => {
    draw();
    for (const id of Object.keys(figures)) Plotly.Plots.resize(one(`#${id}-plot`));
  });
}

begin();
