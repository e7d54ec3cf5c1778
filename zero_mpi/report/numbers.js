// Numbers for people, in the forms of format.py, so that a read-out looks like the page that Python wrote.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const LETTERS = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]];
const TIMES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

const digits = (value, most) => String(Number(value.toPrecision(most)));
const grouped = (value) => Math.round(value).toLocaleString("en-US");

function plain(value) {
  const size = Math.abs(value);
  if (size && !(size >= 1e-4 && size < 1e6)) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  return size < 1e4 ? digits(value, 4) : grouped(value);
}

function count(value) {
  for (const [limit, scale, letter] of LETTERS)
    if (Math.abs(value) >= limit) return digits(value / scale, 4) + letter;
  return Number.isInteger(value) || Math.abs(value) >= 1000 ? grouped(value) : digits(value, 4);
}

function binaryUnit(value) {
  let unit = 0;
  for (value = Math.abs(value); value >= 1024 && unit + 1 < BINARY.length; unit++) value /= 1024;
  return unit;
}

function bytes(value) {
  const unit = binaryUnit(value);
  return unit ? `${digits(value / 1024 ** unit, 4)} ${BINARY[unit]}` : `${grouped(value)} B`;
}

function seconds(value) {
  if (value < 10) return `${digits(value, 2)} s`;
  const whole = Math.round(value);
  for (let i = 0; i + 1 < TIMES.length; i++) {
    const [large, name] = TIMES[i], [small, less] = TIMES[i + 1];
    if (whole < large) continue;
    const rest = Math.floor((whole % large) / small);
    return `${Math.floor(whole / large)} ${name}` + (rest ? ` ${rest} ${less}` : "");
  }
  return `${whole} s`;
}

// Labels of an axis, all in the unit of the largest.
function labels(places, form) {
  const most = Math.max(...places.map(Math.abs));
  if (form === "bytes") {
    const unit = binaryUnit(most);
    return places.map((place) => (place ? `${digits(place / 1024 ** unit, 4)} ${BINARY[unit]}` : "0"));
  }
  if (form === "count") {
    const [, scale, letter] = LETTERS.find(([limit]) => most >= limit) || [0, 1, ""];
    return places.map((place) => (place && letter ? digits(place / scale, 4) + letter : count(place)));
  }
  return places.map(FORMS[form]);
}

const percent = (value) => (Math.abs(value) < 9.99 ? `${digits(100 * value, 3)} %` : `${grouped(100 * value)} %`);
const FORMS = { plain, count, bytes, seconds, percent };

// Round numbers from low to high, about `most` of them.
function ticks(low, high, most, form) {
  const unit = form === "bytes" ? 1024 ** binaryUnit(Math.max(Math.abs(low), Math.abs(high))) : 1;
  const rough = (high - low) / unit / Math.max(most, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const [, times] = [[7, 10], [3.2, 5], [1.4, 2], [0, 1]].find(([least]) => rough / power >= least);
  let step = times * power;
  if (form === "seconds" && rough > 0.5) step = CLOCK.find((size) => size >= rough) || step;
  step *= unit;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(i * step + 0); // not -0
  return found;
}

// Powers of ten, with 2 and 5 between them where they are few.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), found = [];
  const skip = Math.max(1, Math.ceil((last - first) / 6));
  for (let power = first; power <= last; power += skip)
    for (const times of last - first > 3 ? [1] : [1, 2, 5]) {
      const place = times * 10 ** power;
      if (place >= low * 0.999 && place <= high * 1.001) found.push(place);
    }
  return found.length > 1 ? found : ticks(low, high, 4, "plain");
}
