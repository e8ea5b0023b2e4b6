"use strict";
// Crosshairs on the charts, hover on the plans, the selector between plans. The page is complete without it.
const NS = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");

function element(name, attributes) {
  const made = document.createElementNS(NS, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
}

function showTip(rows, x, y) {
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.height - 6)) + "px";
}

function line(text, value, color) {
  const row = document.createElement(value === undefined && color === undefined ? "b" : "div");
  if (color !== undefined) row.appendChild(document.createElement("i")).style.background = `var(--c${color})`;
  row.append(text);
  if (value !== undefined) row.appendChild(document.createElement("span")).textContent = value;
  return row;
}

// ---- charts

function written(value, format) {
  if (format === "loss") return value.toFixed(4);
  if (format === "percent") return (100 * value).toFixed(1) + "%";
  if (format === "bytes") {
    const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
    return (value / 1024 ** power).toFixed(power ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
  }
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString();
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

// The last place that is not beyond x, by half a step: what was known then; -1 where nothing was.
function latest(xs, x) {
  const i = nearest(xs, x);
  return xs[i] <= x + 0.5 ? i : i - 1;
}

class Crosshair {
  constructor(svg) {
    this.svg = svg;
    this.data = JSON.parse(svg.dataset.chart);
    this.longest = this.data.series.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
    this.hair = svg.appendChild(element("path", { class: "hair", visibility: "hidden" }));
    this.dots = this.data.series.map((s) => svg.appendChild(element("circle", { class: `dot c${s.color}`, r: 4, visibility: "hidden" })));
    svg.addEventListener("pointermove", (event) => this.follow(event));
    svg.addEventListener("pointerleave", () => hideAll());
    svg.addEventListener("blur", () => hideAll());
    svg.addEventListener("keydown", (event) => this.key(event));
  }

  across(x) {
    const [left, right] = this.data.box, [low, high] = this.data.x;
    return left + ((x - low) / (high - low)) * (right - left);
  }

  up(y) {
    const [, , top, bottom] = this.data.box, [low, high] = this.data.y;
    const share = this.data.log ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
    return bottom - Math.min(1, Math.max(0, share)) * (bottom - top);
  }

  follow(event) {
    const box = this.svg.getBoundingClientRect(), [left, right] = this.data.box, [low, high] = this.data.x;
    const at = ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
    const x = low + ((Math.min(right, Math.max(left, at)) - left) / (right - left)) * (high - low);
    this.select(this.longest[nearest(this.longest, x)], event.clientX, event.clientY);
  }

  key(event) {
    const last = this.longest.length - 1, jump = event.shiftKey ? 10 : 1;
    const here = this.place ?? last;
    const next = { ArrowLeft: here - jump, ArrowRight: here + jump, Home: 0, End: last }[event.key];
    if (event.key === "Escape") return hideAll();
    if (next === undefined) return;
    event.preventDefault();
    this.place = Math.min(last, Math.max(0, next));
    const box = this.svg.getBoundingClientRect(), x = this.longest[this.place];
    this.select(x, box.left + (this.across(x) / this.svg.viewBox.baseVal.width) * box.width, box.top + box.height / 3);
  }

  select(x, clientX, clientY) {
    for (const other of crosshairs) if (other.data.xLabel === this.data.xLabel) other.mark(x);
    const rows = [line(`${this.data.xLabel} ${this.data.xNames[x] ?? x.toLocaleString("en")}`)];
    this.data.series.forEach((s) => {
      const i = latest(s.x, x);
      if (i < 0) return;
      const label = x - s.x[i] > 0.5 ? `${s.name} (at ${s.x[i].toLocaleString("en")})` : s.name;
      rows.push(line(label, written(s.y[i], this.data.format), s.color));
    });
    showTip(rows, clientX, clientY);
  }

  mark(x) {
    const [, , top, bottom] = this.data.box, at = this.across(x);
    this.hair.setAttribute("d", `M${at} ${top}V${bottom}`);
    this.hair.setAttribute("visibility", "visible");
    this.data.series.forEach((s, i) => {
      const k = latest(s.x, x);
      this.dots[i].setAttribute("visibility", k < 0 ? "hidden" : "visible");
      if (k < 0) return;
      this.dots[i].setAttribute("cx", this.across(s.x[k]));
      this.dots[i].setAttribute("cy", this.up(s.y[k]));
    });
  }

  hide() {
    for (const part of [this.hair, ...this.dots]) part.setAttribute("visibility", "hidden");
  }
}

function hideAll() {
  tip.hidden = true;
  for (const crosshair of crosshairs) crosshair.hide();
}

let crosshairs = [];

// ---- plans

function bindPlan(svg) {
  const data = JSON.parse(svg.dataset.plan);
  const bars = [...svg.querySelectorAll("[data-d], [data-info]")];
  let place = -1;

  function pick(bar, x, y) {
    svg.querySelectorAll(".on").forEach((b) => b.classList.remove("on"));
    svg.classList.toggle("picked", Boolean(bar));
    if (!bar) return void (tip.hidden = true);
    const same = bar.dataset.d === undefined ? [bar] : svg.querySelectorAll(`[data-d="${bar.dataset.d}"]`);
    same.forEach((b) => b.classList.add("on"));
    showTip(describe(bar), x, y);
  }

  function describe(bar) {
    if (bar.dataset.info) {
      const [first, ...others] = bar.dataset.info.split("|");
      return [line(first), ...others.map((text) => line(text, ""))];
    }
    const [length, index] = data.documents[bar.dataset.d];
    const [batch, slots, degree, comm, count, rows, seconds, padded] = data.groups[index];
    const shared = count > 1 ? ` of ${count} documents${padded}` : padded;
    return [
      line(`document ${bar.dataset.d}`),
      line("tokens", length.toLocaleString("en")),
      line("micro-batch", String(batch)),
      line(degree > 1 ? "slots" : "slot", slots),
      line("degree", degree > 1 ? `${degree}, ${comm}` : "1"),
      line("rows on a slot", Math.ceil(length / degree).toLocaleString("en")),
      line(`group${shared}: rows on a slot`, rows.toLocaleString("en")),
      line("group: predicted", seconds),
    ];
  }

  svg.addEventListener("pointermove", (event) => pick(event.target.closest("[data-d], [data-info]"), event.clientX, event.clientY));
  svg.addEventListener("pointerleave", () => pick(null));
  svg.addEventListener("blur", () => pick(null));
  svg.addEventListener("keydown", (event) => {
    const next = { ArrowLeft: place - 1, ArrowUp: place - 1, ArrowRight: place + 1, ArrowDown: place + 1, Home: 0, End: bars.length - 1 }[event.key];
    if (event.key === "Escape") return pick(null);
    if (next === undefined || !bars.length) return;
    event.preventDefault();
    place = Math.min(bars.length - 1, Math.max(0, next));
    const box = bars[place].getBoundingClientRect();
    pick(bars[place], box.right, box.top);
  });
}

function showPlan() {
  const index = document.getElementById("plan-choice")?.value ?? "0";
  const unit = document.querySelector('.switch [aria-pressed="true"]').dataset.unit;
  tip.hidden = true;
  for (const card of document.querySelectorAll(".plan")) {
    card.hidden = card.dataset.planIndex !== index;
    if (card.hidden) continue;
    const picture = card.querySelector(".picture"), wanted = card.querySelector(`template[data-unit="${unit}"]`);
    if (!wanted) continue; // it is shown already
    const shown = [...picture.children];
    if (shown.length) keep(card, shown, picture.dataset.unit ?? "seconds");
    picture.dataset.unit = unit;
    picture.replaceChildren(wanted.content);
    wanted.remove();
    for (const svg of picture.children) bindPlan(svg);
  }
}

function keep(card, pictures, unit) {
  const template = card.appendChild(document.createElement("template"));
  template.dataset.unit = unit;
  template.content.append(...pictures.map((svg) => svg.cloneNode(true)));
}

// What is in `root` follows the pointer and the keys from now on; charts that have left the page do not any more.
function bind(root) {
  crosshairs = crosshairs.filter((crosshair) => crosshair.svg.isConnected);
  for (const svg of root.querySelectorAll("svg[data-chart]")) crosshairs.push(new Crosshair(svg));
  root.querySelectorAll("svg.gantt").forEach(bindPlan);
  root.querySelector("#plan-choice")?.addEventListener("change", showPlan);
  for (const button of root.querySelectorAll(".switch button")) button.addEventListener("click", () => showUnit(button.dataset.unit));
}

function showUnit(unit) {
  document.querySelectorAll(".switch button").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.unit === unit)));
  showPlan();
}

bind(document);
