// The value of the page, and numbers as texts.

// Everything is read from this value and shown by textContent: no text becomes markup.
const page = JSON.parse(document.getElementById("document").textContent);
const { timeline, memory, edges, decisions } = page;
const byId = (id) => document.getElementById(id);

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// --- texts ---

const rounded = (x) => (x >= 1000 ? Math.round(x).toString() : Number(x.toPrecision(4)).toString());

function secsText(secs) {
  if (secs === 0) return "0 s";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (Math.abs(secs) >= size) return `${rounded(secs / size)} ${unit}`;
  }
  return `${rounded(secs * 1e9)} ns`;
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  let size = bytes;
  while (Math.abs(size) >= 1024 && i < units.length - 1) {
    size /= 1024;
    i += 1;
  }
  return `${rounded(size)} ${units[i]}`;
}

const share = (x) => `${(100 * x).toFixed(1)}%`;
