// One chart: draws grid, bands, lines and marks of what is in sight, and tells values under a place.
// It knows nothing of the page around it; a view says which axis, range and runs are wanted.

const SVG = "http://www.w3.org/2000/svg";
const RIGHT = 14, TOP = 16, BOTTOM = 26, LETTER = 6.6, LEAST_LEFT = 46, EDGE = 5;
const GLYPHS = {
  fault: "M-4-4L4 4M4-4L-4 4",
  resumed: "M-3.5-4.5L4.5 0L-3.5 4.5Z",
  stopped: "M-3.5-3.5H3.5V3.5H-3.5Z",
  warning: "M0-4.5L4.5 4H-4.5Z",
  saved: "M0-3.5L3.5 0L0 3.5L-3.5 0Z",
};
const AXES = { step: ["step", "count"], seconds: ["time", "seconds"], tokens: ["tokens", "count"] };

function node(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The first place in sorted numbers whose number is not below `wanted`.
function search(numbers, wanted) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

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

class Curve {
  constructor(run, series, data) {
    Object.assign(this, { run, series, mean: data.m, least: data.l || data.m, greatest: data.g || data.m });
    this.last = data.v;
    this.hasBand = Boolean(data.l);
    this.at = data.i || run.step.map((_, place) => place);
    this.odd = new Set(data.o || []);
    this.axes = {};
  }

  // Numbers of the curve's points on an axis.
  x(axis) {
    this.axes[axis] ||= this.at.map((place) => this.run[axis][place]);
    return this.axes[axis];
  }

  smooth(keep) {
    if (this.kept !== keep) [this.kept, this.soft] = [keep, smoothed(this.mean, keep)];
    return this.soft;
  }

  // The point nearest to a place.
  nearest(axis, place) {
    const x = this.x(axis), after = search(x, place);
    if (after === 0) return 0;
    return after === x.length || place - x[after - 1] < x[after] - place ? after - 1 : after;
  }
}

class Chart {
  constructor(figure, spec, runs) {
    this.figure = figure;
    this.spec = spec;
    this.canvas = figure.querySelector(".canvas");
    this.svg = figure.querySelector("svg.plot");
    this.names = [...this.svg.querySelectorAll(":scope > title, :scope > desc")];
    this.log = false;
    this.curves = runs.flatMap((run) =>
      spec.series.filter((one) => run.curves[one.key]).map((one) => new Curve(run, one, run.curves[one.key])));
    this.runs = runs;
  }

  inSight(view) {
    return this.curves.filter((curve) => !view.hidden.has(curve.run.number) && curve.run[view.axis]);
  }

  draw(view) {
    this.view = view;
    this.width = Math.max(200, this.canvas.clientWidth);
    this.height = this.canvas.clientHeight;
    const curves = this.inSight(view);
    this.range = this.values(curves, view);
    const rows = this.axisTicks();
    this.left = Math.max(LEAST_LEFT, 12 + LETTER * Math.max(1, ...rows.map(([, text]) => text.length)));
    // What is out of sight is cut off, a sign's width further out so that signs at the ends are whole.
    const inner = node("g", { transform: `translate(${EDGE} 0)` });
    const cut = node("svg", {
      x: this.left - EDGE, y: 0, width: this.width - this.left - RIGHT + 2 * EDGE, height: this.height,
    }, inner);
    for (const run of this.runs) if (!view.hidden.has(run.number) && run[view.axis]) this.drawMarks(inner, run);
    for (const curve of curves) this.drawCurve(inner, curve);
    this.cursorLayer = node("g", { class: "cursor" });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren(...this.names, ...this.grid(rows), cut, this.cursorLayer);
  }

  // The range of values in sight, a little wider, and never empty.
  values(curves, view) {
    let low = Infinity, high = -Infinity;
    for (const curve of curves) {
      const x = curve.x(view.axis);
      const first = search(x, view.range[0]), last = search(x, view.range[1] * (1 + 1e-12));
      for (let i = Math.max(0, first - (first === last)); i < Math.max(last, first + 1) && i < x.length; i++) {
        if (curve.mean[i] === null || (this.log && !(curve.least[i] > 0))) continue;
        low = Math.min(low, curve.least[i]);
        high = Math.max(high, curve.greatest[i]);
      }
    }
    if (low > high) [low, high] = this.log ? [0.1, 1] : [0, 1];
    if (this.log) {
      const room = Math.max((high / low) ** 0.06, 1.02);
      return [low / room, high * room];
    }
    if (this.spec.fromZero) low = Math.min(low, 0);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [this.spec.fromZero && low === 0 ? 0 : low - room, high + room];
  }

  axisTicks() {
    const most = Math.max(2, Math.floor((this.height - TOP - BOTTOM) / 40));
    const places = this.log ? logTicks(...this.range) : ticks(...this.range, most, this.spec.form);
    const texts = labels(places, this.spec.form);
    return places.map((place, i) => [place, texts[i]]);
  }

  across(place) {
    const [low, high] = this.view.range;
    return ((place - low) / (high - low)) * (this.width - this.left - RIGHT);
  }

  down(value) {
    const turn = this.log ? Math.log : (number) => number;
    const [low, high] = this.range.map(turn);
    return TOP + ((high - turn(value)) / (high - low)) * (this.height - TOP - BOTTOM);
  }

  // The number on the axis under a pixel of the page.
  place(clientX) {
    const box = this.svg.getBoundingClientRect();
    const pixel = ((clientX - box.left) / box.width) * this.width - this.left;
    const [low, high] = this.view.range, inside = this.width - this.left - RIGHT;
    return low + (Math.min(Math.max(pixel, 0), inside) / inside) * (high - low);
  }

  grid(rows) {
    const end = this.width - RIGHT, base = this.height - BOTTOM, found = [];
    for (const [place, text] of rows) {
      const y = this.down(place);
      found.push(node("line", { class: "grid", x1: this.left, x2: end, y1: y, y2: y }));
      found.push(node("text", { class: "tick", x: this.left - 7, y: y + 3.6, "text-anchor": "end" }, text));
    }
    const [name, form] = AXES[this.view.axis];
    const places = ticks(...this.view.range, Math.max(2, Math.floor(this.width / 100)), form)
      .filter((place) => form !== "count" || Number.isInteger(place));
    const texts = labels(places, form);
    places.forEach((place, i) => {
      const x = this.left + this.across(place);
      found.push(node("text", { class: "tick", x, y: base + 17, "text-anchor": "middle" }, texts[i]));
    });
    found.push(node("text", { class: "tick name", x: 2, y: base + 17 }, name));
    found.push(node("line", { class: "base", x1: this.left, x2: end, y1: base, y2: base }));
    return found;
  }

  drawMarks(inner, run) {
    const base = this.height - BOTTOM;
    for (const [step, kind] of run.marks) {
      const x = this.across(run.placeOf(step, this.view.axis));
      const group = node("g", { class: `mark ${kind} ${run.colour}` });
      const y = kind === "saved" ? base : TOP - 8;
      if (kind !== "saved") group.append(node("path", { class: "stem", d: `M${x.toFixed(1)} ${base}V${TOP}` }));
      group.append(node("path", { class: "glyph", d: GLYPHS[kind], transform: `translate(${x.toFixed(1)} ${y})` }));
      inner.append(group);
    }
  }

  drawCurve(inner, curve) {
    const kind = curve.series.dots ? "val" : "main";
    const group = node("g", { class: `curve ${curve.run.colour} ${kind}`, "data-run": curve.run.number });
    const keep = curve.series.dots ? 0 : this.view.smooth;
    const found = this.perPixel(curve, curve.mean);
    if (curve.hasBand || found.some((one) => one.low < one.high))
      group.append(node("path", { class: "band", d: this.area(found) }));
    group.append(node("path", { class: keep ? "line raw" : "line", d: this.line(found) }));
    if (keep) group.append(node("path", { class: "line", d: this.line(this.perPixel(curve, curve.smooth(keep))) }));
    if (curve.series.dots && found.length <= 200)
      for (const one of found)
        if (one.y !== null) group.append(node("circle", { class: "dot", cx: one.x, cy: one.y, r: 3.2 }));
    const y = this.height - BOTTOM - 8, x = curve.x(this.view.axis);
    for (const i of curve.odd)
      group.append(node("path", { class: "odd", d: `M${this.across(x[i]) - 3.5} ${y - 3.5}l7 7m0-7l-7 7` }));
    inner.append(group);
  }

  // Points in sight and one on each side; where a pixel holds several, their mean and extremes.
  perPixel(curve, values) {
    const x = curve.x(this.view.axis), [from, to] = this.view.range, found = [];
    const first = Math.max(0, search(x, from) - 1), last = Math.min(x.length, search(x, to) + 1);
    let now = null;
    for (let i = first; i < last; i++) {
      const pixel = Math.floor(this.across(x[i]));
      if (!now || now.pixel !== pixel) {
        now = { pixel, x: this.across(x[i]), sum: 0, count: 0, low: Infinity, high: -Infinity };
        found.push(now);
      }
      if (values[i] === null || (this.log && !(values[i] > 0))) continue;
      now.sum += values[i];
      now.count++;
      now.low = Math.min(now.low, curve.least[i]);
      now.high = Math.max(now.high, curve.greatest[i]);
    }
    for (const one of found) one.y = one.count ? this.down(one.sum / one.count) : null;
    return found;
  }

  line(found) {
    let path = "", open = false;
    found.forEach((one, i) => {
      if (one.y === null) return (open = false);
      path += `${open ? "L" : "M"}${one.x.toFixed(1)} ${one.y.toFixed(1)}`;
      if (!open && (i + 1 === found.length || found[i + 1].y === null)) path += "h.1";
      open = true;
    });
    return path;
  }

  area(found) {
    const parts = [[]];
    for (const one of found) one.y === null ? parts.push([]) : parts.at(-1).push(one);
    const edge = (one, value) => `${one.x.toFixed(1)} ${this.down(Math.max(value, this.log ? this.range[0] : value)).toFixed(1)}`;
    return parts.filter((part) => part.length).map((part) => {
      const there = part.map((one) => edge(one, one.high)), back = part.map((one) => edge(one, one.low)).reverse();
      return `M${there.concat(back).join("L")}Z`;
    }).join("");
  }

  // Show the place under the pointer, or none. Returns the values there, or the last ones.
  point(place) {
    this.cursorLayer.replaceChildren();
    const found = [];
    for (const curve of this.inSight(this.view)) {
      const at = place === null ? curve.mean.length - 1 : curve.nearest(this.view.axis, place);
      found.push({ curve, value: place === null ? curve.last : curve.mean[at], low: curve.least[at], high: curve.greatest[at] });
      if (place === null || curve.mean[at] === null || (this.log && !(curve.mean[at] > 0))) continue;
      const x = this.across(curve.x(this.view.axis)[at]), inside = x >= 0 && x <= this.width - this.left - RIGHT;
      if (inside)
        this.cursorLayer.append(node("circle", {
          class: `spot ${curve.run.colour} ${curve.series.dots ? "val" : "main"}`, cx: this.left + x, cy: this.down(curve.mean[at]), r: 4,
        }));
    }
    if (place !== null) {
      const x = Math.round(this.left + this.across(place)) + 0.5;
      this.cursorLayer.prepend(node("line", { class: "hair", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }));
    }
    return found;
  }

  // The area that is being chosen.
  select(from, to) {
    const [x1, x2] = [from, to].map((place) => this.left + this.across(place)).sort((a, b) => a - b);
    this.cursorLayer.append(
      node("rect", { class: "chosen", x: x1, y: TOP, width: x2 - x1, height: this.height - TOP - BOTTOM }));
  }
}
