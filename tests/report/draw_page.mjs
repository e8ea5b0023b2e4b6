// Draws a page without a browser: node draw_page.mjs PAGE.html [WIDTH]. Prints the elements that its script made.
import { readFileSync } from "node:fs";
import vm from "node:vm";

const html = readFileSync(process.argv[2], "utf8"), width = Number(process.argv[3] ?? 1200);
const data = html.match(/<script type="application\/json" id="data">(.*?)<\/script>/s)[1];
const script = html.match(/<script>(.*?)<\/script>/s)[1];

class Element {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, children: [], listeners: {}, dataset: {}, style: {}, parent: null, clientWidth: width, hidden: false, selectedIndex: 0 });
    this.classList = { add() {}, remove() {}, toggle() {} };
  }
  get isConnected() { return this === main || (this.parent?.isConnected ?? false); }
  get firstElementChild() { return this.children[0]; }
  get textContent() { return this.children.map((child) => child.textContent ?? child).join(""); }
  setAttribute(name, value) {
    if (/\b(NaN|undefined|Infinity)\b/.test(value) && name !== "aria-label") throw new Error(`${this.name} ${name}="${value}"`);
    this.attributes[name] = String(value);
  }
  append(...children) { for (const child of children) if (this.children.push(child) && child instanceof Element) child.parent = this; }
  prepend(child) { this.children.unshift(child); child.parent = this; }
  after(child) { this.parent.children.splice(this.parent.children.indexOf(this) + 1, 0, child); child.parent = this.parent; }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  replaceWith(other) { this.parent.children[this.parent.children.indexOf(this)] = other; other.parent = this.parent; this.parent = null; }
  remove() { this.parent.children = this.parent.children.filter((child) => child !== this); this.parent = null; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  getBoundingClientRect() { return { left: 0, right: width, top: 0, width, height: 200 }; }
  querySelector() { return null; }
  querySelectorAll() { return []; }
  closest() { return null; }
  set innerHTML(text) { this.replaceChildren(Object.assign(new Element("markup"), { markup: text })); }
  all() { return [this, ...this.children.flatMap((child) => child.all?.() ?? [])]; }
}

const main = new Element("main"), tip = new Element("tip"), timers = [];
const document = {
  getElementById: (id) => (id === "tip" ? tip : { textContent: data }),
  querySelector: () => main,
  createElement: (name) => new Element(name),
  createElementNS: (_, name) => new Element(name),
};
vm.runInNewContext(script, { document, innerWidth: width, innerHeight: 800, addEventListener() {}, requestAnimationFrame() {}, setTimeout: (call) => timers.push(call) });
const event = { clientX: width / 2, clientY: 50, key: "ArrowLeft", preventDefault() {}, target: main };
for (const element of main.all()) for (const listener of Object.values(element.listeners)) listener(event);
const elements = main.all().map((e) => ({ name: e.name, words: e.children.filter((c) => typeof c === "string").join(""), ...e.attributes }));
console.log(JSON.stringify({ title: document.title, timers: timers.length, tip: tip.textContent, elements }));
