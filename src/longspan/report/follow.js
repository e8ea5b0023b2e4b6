
// ---- a run that is followed: every two seconds the parts that changed are put in place of those before

const EVERY = 2000, LONGEST = 15000; // milliseconds between two questions, and after questions without an answer
const parts = new Map([...document.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
const tags = {}; // of what each part shows
const waiting = new Map(); // what came for a part that is under the pointer
let pause = EVERY;

function put(part, html) {
  const scrolls = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  const unit = part.querySelector('.switch [aria-pressed="true"]')?.dataset.unit;
  part.innerHTML = html;
  bind(part);
  if (unit && unit !== "seconds") showUnit(unit);
  [...part.querySelectorAll(".scroll")].forEach((box, i) => (box.scrollLeft = scrolls[i] ?? 0));
}

// A picture that is being read stays until the pointer or the focus has left it.
function isRead(part) {
  return part.querySelector("svg:hover, svg:focus") !== null;
}

function putWaiting() {
  for (const [name, html] of waiting) {
    if (isRead(parts.get(name))) continue;
    waiting.delete(name);
    put(parts.get(name), html);
  }
}

function showLost(words) {
  const state = document.querySelector(".state");
  if (!state) return;
  state.className = "state lost";
  state.textContent = words;
  delete tags.status; // an answer puts it right
}

async function refresh() {
  if (document.hidden) return void setTimeout(refresh, EVERY);
  try {
    const here = location.pathname.replace(/\/?$/, "/");
    const answer = await fetch(`${here}parts?${new URLSearchParams(tags)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const { title, over, changed } = await answer.json();
    document.title = title;
    for (const name in changed) {
      if (!parts.has(name)) continue;
      [tags[name]] = changed[name];
      waiting.set(name, changed[name][1]);
    }
    putWaiting();
    pause = EVERY;
    if (over) return void setInterval(putWaiting, EVERY);
  } catch {
    showLost("no answer");
    pause = Math.min(LONGEST, 2 * pause);
  }
  setTimeout(refresh, pause);
}

document.addEventListener("visibilitychange", () => (pause = EVERY));
setTimeout(refresh, EVERY);
