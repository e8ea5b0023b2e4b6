"use strict";
// Draws the JSON value of the page. Its words are set as text; only pictures of plans are markup, which longspan drew
// and escaped. A page of a run that is followed asks for newer values and replaces the sections that changed.
const [tip, main] = [document.getElementById("tip"), document.querySelector("main")];
const SVG = "http://www.w3.org/2000/svg";
const fitted = new Map(); // what is drawn anew when its width changes: element → [width, draw]
const crosshairs = new Set();

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== ""));
  return element;
}
const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// ---- numbers

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const bytePower = (value) => Math.min(4, Math.floor(Math.log2(Math.max(1, Math.abs(value))) / 10));

function written(value, format, digits = 6, notation = "standard") {
  const power = format === "bytes" ? bytePower(value) : 0, unit = { bytes: " " + BYTES[power], percent: "%" }[format] ?? "";
  const number = Number(((format === "percent" ? 100 * value : value) / 1024 ** power).toPrecision(digits));
  if (number && Math.abs(number) < 1e-3) return number.toExponential() + unit;
  return number.toLocaleString("en", { notation, maximumSignificantDigits: digits }) + unit;
}

// Round numbers from low to high: 1, 2, 2.5 or 5 times a power of ten.
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const least = (high - low) / count, power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= least * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => (first + i) * step);
}

// Powers of ten, with 2 and 5 times these up to a ratio of 300; over many powers every second, third and so on.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), powers = Math.ceil(Math.log10(high)) - first + 1;
  const step = Math.max(1, Math.round(powers / 6));
  const all = Array.from({ length: powers }, (_, i) => first + i).filter((power) => power % step === 0);
  const values = all.flatMap((power) => (high / low <= 300 ? [1, 2, 5] : [1]).map((m) => m * 10 ** power));
  return values.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
}

// ---- charts

// Least and greatest x and y. Curves that vary by rounding are drawn flat, in the middle.
function limits(chart, series) {
  const xs = series.flatMap((s) => s.x), ys = [...series.flatMap((s) => s.y), ...(chart.references ?? []).map(([y]) => y)];
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const side = x0 === x1 ? 0.5 : chart.x_names ? 0.03 * (x1 - x0) : 0;
  if (chart.log) return [x0 - side, x1 + side, y0 / 1.15, y1 * 1.15];
  if (y1 - y0 < 1e-9 * Math.abs(y1)) y0 = y1;
  if (chart.zero) y0 = Math.min(y0, 0);
  const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.05 || 1;
  return [x0 - side, x1 + side, chart.zero && y0 === 0 ? 0 : y0 - room, y1 + room];
}

// Four shapes, by which curves differ without colour.
function mark(color, x, y, size = 5) {
  const css = `mark c${color}`, reach = 1.25 * size, diamond = `l${reach} ${reach}l${-reach} ${reach}l${-reach} ${-reach}z`;
  if (color % 4 === 0) return svg("circle", { class: css, cx: x, cy: y, r: size });
  if (color % 4 === 1) return svg("rect", { class: css, x: x - size, y: y - size, width: 2 * size, height: 2 * size });
  const triangle = `l${reach} ${2 * size}h${-2 * reach}z`;
  return svg("path", { class: css, d: `M${x} ${y - reach}${color % 4 === 2 ? triangle : diamond}` });
}

const label = (words, x, y, anchor, css = "label") => svg("text", { class: css, x, y, "text-anchor": anchor }, words);
const path = (css, d) => svg("path", { class: css, d });
const key = (...shapes) => svg("svg", { class: "key", viewBox: "0 0 22 12", "aria-hidden": true }, shapes);

function chartFigure(chart) {
  const isDrawn = (s) => (_, i) => !chart.log || s.y[i] > 0;
  const drawable = chart.series.map((s) => ({ ...s, x: s.x.filter(isDrawn(s)), y: s.y.filter(isDrawn(s)) }));
  const series = drawable.filter((s) => s.x.length), height = chart.tall ? 330 : 190, place = html("div");
  const title = html("figcaption", {}, html("b", {}, chart.title), html("span", { class: "unit" }, chart.unit));
  function entry({ kind, color, name }) {
    return html("li", {}, key(path(`curve ${kind} c${color}`, "M1 6H21"), kind === "marks" ? mark(color, 11, 6) : ""), name);
  }
  const isNamed = series.length > 1 && (chart.tall || series.every((s) => s.kind !== "faint"));
  const legend = isNamed ? html("ul", { class: "legend" }, series.map(entry)) : "";
  if (series.length) fitted.set(place, [0, (width) => place.replaceChildren(drawChart(chart, series, width, height))]);
  else place.append("nothing recorded");
  return html("figure", { class: chart.tall ? "chart tall" : "chart" }, title, legend, place);
}

function drawChart(chart, series, width, height) {
  const [x0, x1, y0, y1] = limits(chart, series), [left, right, top, bottom] = [54, width - 14, 10, height - 36];
  const across = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
  const share = (y) => (chart.log ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0));
  const up = (y) => bottom - Math.min(1, Math.max(0, share(y))) * (bottom - top);
  const name = chart.x_label ?? "step", words = `${chart.title}: ${chart.unit} over ${name}. Arrow keys read the values.`;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": words });
  const add = (...elements) => drawing.append(...elements);

  const unit = chart.format === "bytes" ? 1024 ** bytePower(y1) : 1;
  const yValues = chart.log ? logTicks(y0, y1) : ticks(y0 / unit, y1 / unit, height / 40).map((y) => y * unit);
  const xValues = chart.x_names?.map((_, i) => i) ?? ticks(x0, x1, Math.max(3, width / 110)).filter(Number.isInteger);
  for (const y of yValues) {
    const tick = written(y, chart.format, 9, "compact");
    add(path("grid", `M${left} ${up(y)}H${right}`), label(tick, left - 7, up(y) + 3.5, "end", "tick"));
  }
  for (const x of xValues) {
    const tick = chart.x_names?.[x] ?? written(x, "", 9, "compact");
    add(path("grid short", `M${across(x)} ${bottom}v4`), label(tick, across(x), bottom + 17, "middle", "tick"));
  }
  add(path("axis", `M${left} ${bottom}H${right}`), label(name, right, bottom + 31, "end"));

  let free = left; // words of events that would cover those of the one before are left out
  for (const [x, event] of (chart.events ?? []).filter(([x]) => x >= x0 && x <= x1)) {
    add(path("reference", `M${across(x)} ${top}V${bottom}`));
    const wide = 6.8 * event.length, start = across(x) + 4 + wide <= right ? across(x) + 4 : across(x) - 4 - wide;
    if (start < free) continue;
    add(label(event, start, bottom - 6, "start", "label halo"));
    free = start + wide;
  }
  const marked = []; // a mark where others are is a larger ring around them
  for (const s of series) {
    const points = s.x.map((x, i) => [across(x), up(s.y[i])]);
    add(path(`curve ${s.kind} c${s.color}`, "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")));
    for (const [x, y] of s.kind === "marks" || points.length === 1 ? points : []) {
      const under = marked.filter(([a, b]) => Math.hypot(a - x, b - y) < 6).length;
      add(fill(mark(s.color, x, y, 5 + 3.5 * under), under ? { class: `mark ring c${s.color}` } : {}, []));
      marked.push([x, y]);
    }
  }
  for (const [y, reference] of chart.references ?? []) {
    const below = up(y) < top + 18 ? 14 : -6;
    add(path("reference", `M${left} ${up(y)}H${right}`), label(reference, right - 2, up(y) + below, "end", "label halo"));
  }
  const backward = (at) => x0 + ((Math.min(right, Math.max(left, at)) - left) / (right - left)) * (x1 - x0);
  bindCrosshair({ drawing, chart, series, name, across, up, backward, width, bottom });
  return drawing;
}

// ---- reading values, by pointer or keys

function showTip(rows, x, y) {
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16) + "px";
  tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.height - 6)) + "px";
}

function line(words, value, color) {
  if (value === undefined) return html("b", {}, words);
  return html("div", {}, color === undefined ? "" : html("i", { class: `c${color}` }), words, html("span", {}, value));
}

// Keys go from place to place: one forward or backward, ten with Shift, or to the ends. `leave` ends the reading.
function bindReading(drawing, count, place, pick, leave) {
  for (const event of ["pointerleave", "blur"]) drawing.addEventListener(event, leave);
  drawing.addEventListener("keydown", (event) => {
    const jump = event.shiftKey ? 10 : 1, back = place - jump, on = place + jump;
    const next = { ArrowLeft: back, ArrowUp: back, ArrowRight: on, ArrowDown: on, Home: 0, End: count - 1 }[event.key];
    if (event.key === "Escape") return leave();
    if (next === undefined || !count) return;
    event.preventDefault();
    pick((place = Math.min(count - 1, Math.max(0, next))));
  });
}

function bindCrosshair({ drawing, chart, series, name, across, up, backward, width, bottom }) {
  const longest = series.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x, hair = path("hair", "");
  const dots = series.map((s) => svg("circle", { class: `dot c${s.color}`, r: 4 }));
  const latest = (s, x) => s.x.findLastIndex((at) => at <= x + 0.5); // what was known then; -1 where nothing was
  const hide = () => [hair, ...dots].forEach((part) => part.setAttribute("visibility", "hidden"));
  function mark(x) {
    fill(hair, { d: `M${across(x)} 10V${bottom}`, visibility: "visible" }, []);
    series.forEach((s, i) => {
      const k = latest(s, x);
      fill(dots[i], k < 0 ? { visibility: "hidden" } : { visibility: "visible", cx: across(s.x[k]), cy: up(s.y[k]) }, []);
    });
  }
  function select(x, clientX, clientY) {
    for (const other of crosshairs) {
      if (!other.drawing.isConnected) crosshairs.delete(other);
      else if (other.name === name) other.mark(x);
    }
    const rows = series.filter((s) => latest(s, x) >= 0).map((s) => {
      const at = s.x[latest(s, x)], value = written(s.y[latest(s, x)], chart.format);
      return line(x - at > 0.5 ? `${s.name} (at ${at.toLocaleString("en")})` : s.name, value, s.color);
    });
    showTip([line(`${name} ${chart.x_names?.[x] ?? x.toLocaleString("en")}`), ...rows], clientX, clientY);
  }
  function leave() {
    tip.hidden = true;
    for (const crosshair of crosshairs) crosshair.hide();
  }
  drawing.append(hair, ...dots);
  hide();
  crosshairs.add({ drawing, name, mark, hide });
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), x = backward(((event.clientX - box.left) / box.width) * width);
    select(longest.reduce((best, at) => (Math.abs(at - x) < Math.abs(best - x) ? at : best)), event.clientX, event.clientY);
  });
  const pick = (place) => {
    const box = drawing.getBoundingClientRect();
    select(longest[place], box.left + (across(longest[place]) / width) * box.width, box.top + box.height / 3);
  };
  bindReading(drawing, longest.length, longest.length - 1, pick, leave);
}

function bindPlan(picture, documents) {
  const bars = [...picture.querySelectorAll("[data-d], [data-info]")];
  function pick(bar, x, y) {
    picture.querySelectorAll(".on").forEach((b) => b.classList.remove("on"));
    picture.classList.toggle("picked", Boolean(bar));
    if (!bar) return void (tip.hidden = true);
    const { d, info } = bar.dataset;
    (d === undefined ? [bar] : picture.querySelectorAll(`[data-d="${d}"]`)).forEach((b) => b.classList.add("on"));
    const [first, ...others] = info?.split("|").map((words) => [words, ""]) ?? [[`document ${d}`], ...documents[d]];
    showTip([line(first[0]), ...others.map(([name, value]) => line(name, value))], x, y);
  }
  function pickPlace(place) {
    const { right, top } = bars[place].getBoundingClientRect();
    pick(bars[place], right, top);
  }
  picture.addEventListener("pointermove", ({ target, clientX, clientY }) => pick(target.closest("[data-d], [data-info]"), clientX, clientY));
  bindReading(picture, bars.length, -1, pickPlace, () => pick(null));
}

function planPart({ plans, first }) {
  let index = first;
  const entry = ([css, words]) => html("li", {}, key(svg("rect", { class: css, width: 22, height: 12 })), words);
  const place = html("div"), picture = html("div", { class: "picture" });
  const choice = html("select", {}, plans.map((plan, i) => html("option", { selected: i === first }, plan.name)));
  function draw(width) {
    const [wide, narrow] = plans[index].pictures;
    picture.innerHTML = width < 700 ? narrow : wide;
    bindPlan(picture.firstElementChild, plans[index].documents);
    const legend = html("ul", { class: "legend" }, plans[index].legend.map(entry));
    place.replaceChildren(parts.facts(plans[index].facts, "facts"), picture, legend);
    tip.hidden = true;
  }
  choice.addEventListener("change", () => draw(place.clientWidth, (index = choice.selectedIndex)));
  fitted.set(place, [0, draw]);
  const controls = html("div", { class: "controls" }, plans.length > 1 ? html("label", {}, "plan ", choice) : "");
  return html("div", {}, controls, place);
}

// ---- parts of sections, by their keys

const named = ([name, ...words]) => [html("dt", {}, name), html("dd", {}, words[0]), words[1] ? html("p", {}, words[1]) : ""];
const parts = {
  note: (words) => html("p", { class: "note" }, words),
  text: (words) => html("pre", {}, words),
  facts: (facts, css = "said") => html("dl", { class: css }, facts.map((fact) => html("div", {}, named(fact)))),
  cards: (cards) => html("dl", { class: "cards" }, cards.map((card) => html("div", { class: "card" }, named(card)))),
  charts: (charts) => html("div", { class: "charts" }, charts.map(chartFigure)),
  details: ({ title, parts: inner }) => html("details", {}, html("summary", {}, title), inner.map(drawPart)),
  plans: planPart,
  table({ names, rows }) {
    const head = html("tr", {}, names.map((name) => html("th", {}, name)));
    const body = rows.map((row) => html("tr", {}, row.map(tableCell)));
    return html("div", { class: "scroll" }, html("table", {}, html("thead", {}, head), html("tbody", {}, body)));
  },
};

function drawPart(part) {
  const [name, value] = Object.entries(part)[0];
  return parts[name](value);
}

function tableCell(cell) {
  return Array.isArray(cell) ? html("td", { class: cell[1] }, cell[0]) : html("td", {}, cell);
}

function header({ title, version, story, lines, state, progress }) {
  const mood = state ? html("span", { class: `state ${state[0]}`, role: "status" }, state[1]) : "";
  const bar = progress?.[1] ? html("progress", { value: progress[0], max: progress[1], "aria-label": "steps" }) : "";
  const sentence = story || mood ? html("p", { class: "story" }, mood, story) : "";
  const subtitles = lines.map((words) => html("p", { class: "sub" }, words));
  return html("header", {}, html("p", { class: "brand" }, `longspan ${version}`), html("h1", {}, title), sentence, bar, subtitles);
}

// ---- the page: a section that changed takes the place of the one before, unless that is being read

const shown = new Map(); // key → [JSON, element]

function show(page) {
  document.title = page.name;
  const keys = new Set();
  let last = null;
  for (const section of [{ key: "", head: page.head }, ...page.sections]) {
    while (keys.has(section.key)) section.key += " ";
    keys.add(section.key);
    const text = JSON.stringify(section), [before, old] = shown.get(section.key) ?? [];
    const title = section.title ? html("h2", {}, section.title) : "";
    let element = old;
    if (!old || (before !== text && !old.querySelector("svg:hover, svg:focus, select:focus"))) {
      element = section.head ? header(section.head) : html("section", {}, title, section.parts.map(drawPart));
      shown.set(section.key, [text, element]);
      if (old) replace(old, element);
      else if (last) last.after(element);
      else main.prepend(element);
    }
    last = element;
  }
  for (const [key, [, element]] of shown) if (!keys.has(key)) shown.delete(key, element.remove());
  fit();
}

function replace(old, element) {
  const [before, after] = [old, element].map((one) => [...one.querySelectorAll(".scroll, details")]);
  old.replaceWith(element);
  after.forEach((box, i) => Object.assign(box, { scrollLeft: before[i]?.scrollLeft ?? 0, open: before[i]?.open ?? false }));
}

function fit() {
  for (const [place, entry] of fitted) {
    if (!place.isConnected) fitted.delete(place);
    else if (entry[0] !== place.clientWidth) entry[1]((entry[0] = place.clientWidth));
  }
}

const EVERY = 2000, LONGEST = 15000; // milliseconds between two questions, and after questions without an answer
let pause = EVERY, page = JSON.parse(document.getElementById("data").textContent), known = "", over = false;

async function refresh() {
  try {
    if (!over && !document.hidden) {
      const answer = await fetch(`${location.pathname.replace(/\/?$/, "/")}data?${known}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      if (answer.status === 200) ({ mark: known, over, page } = await answer.json());
      pause = EVERY;
    }
  } catch {
    page.head.state = ["lost", "no answer"];
    known = ""; // an answer puts it right
    pause = Math.min(LONGEST, 2 * pause);
  }
  show(page);
  setTimeout(refresh, pause);
}

show(page);
addEventListener("resize", () => requestAnimationFrame(fit));
if (page.live) setTimeout(refresh, EVERY);
