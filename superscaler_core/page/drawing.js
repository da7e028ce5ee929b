// The part of the step that is shown, and the canvases that show it.

// --- the part of the step that is shown ---

const whole = Math.max(1, timeline.ns);
const view = { from: 0, to: whole };
let isAsked = false;

function redrawSoon() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    drawAll();
  });
}

function show(from, to) {
  const least = Math.min(whole, 50);
  const length = Math.min(whole, Math.max(least, to - from));
  const start = Math.min(Math.max(0, from), whole - length);
  view.from = start;
  view.to = start + length;
  byId("range").textContent = `${secsText(view.from / 1e9)} to ${secsText(view.to / 1e9)}`;
  redrawSoon();
}

// A factor below 1 zooms in; the moment stays where it is.
function zoom(factor, moment = (view.from + view.to) / 2) {
  show(moment - (moment - view.from) * factor, moment + (view.to - moment) * factor);
}

// --- canvases ---

function prepared(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 1000;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, scale: width / (view.to - view.from) };
}

const BAR = { top: 3, height: 20 };
const LANE = { top: 25, height: 6 };
const ROW_HEIGHT = 34;

// An act that is narrower than a pixel shares its pixel with its neighbours: the pixel gets the
// colour of the activity that takes most of it.
function drawActs(pen, acts, band, width, scale) {
  const paint = (activity, left, wide) => {
    pen.fillStyle = timeline.activities[activity][1];
    pen.fillRect(left, band.top, wide, band.height);
  };
  let pixel = -1;
  let shares = new Map();
  const flush = () => {
    let most = 0;
    let activity = -1;
    for (const [each, much] of shares) if (much > most) [activity, most] = [each, much];
    if (activity >= 0) paint(activity, pixel, 1);
    shares = new Map();
  };
  for (let i = firstAfter(acts, view.from); i < acts.length; i += 1) {
    const act = acts[i];
    if (act[FIELDS.start] >= view.to) break;
    const left = (act[FIELDS.start] - view.from) * scale;
    const right = (act[FIELDS.end] - view.from) * scale;
    const activity = act[FIELDS.activity];
    if (right < 0) continue;
    if (right - left >= 1) {
      paint(activity, Math.max(0, left), Math.min(width, right) - Math.max(0, left));
      continue;
    }
    const at = Math.floor((left + right) / 2);
    if (at !== pixel) flush();
    pixel = at;
    shares.set(activity, (shares.get(activity) || 0) + right - left);
  }
  flush();
}

function drawLabels(pen, device, width, scale) {
  pen.fillStyle = "#fff";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  let before = null;
  let left = 0;
  let right = 0;
  const write = () => {
    if (before === null || before < 0) return;
    const [, , microbatch] = timeline.runs[before];
    const from = Math.max(0, left);
    const to = Math.min(width, right);
    if (microbatch < 0 || to - from < 16) return;
    if (left >= 0) {
      pen.fillRect(left, BAR.top, 1, BAR.height);
    }
    pen.fillText(String(microbatch), (from + to) / 2, BAR.top + BAR.height / 2 + 0.5);
  };
  const acts = fore.get(device);
  for (let i = firstAfter(acts, view.from); i < acts.length; i += 1) {
    const act = acts[i];
    if (act[FIELDS.start] >= view.to) break;
    const run = act[FIELDS.run];
    if (Number.isNaN(run)) continue;
    if (run !== before) {
      write();
      before = run;
      left = (act[FIELDS.start] - view.from) * scale;
    }
    right = (act[FIELDS.end] - view.from) * scale;
  }
  write();
}

const canvases = new Map();

function drawRow(device) {
  const { pen, width, scale } = prepared(canvases.get(device), ROW_HEIGHT);
  drawActs(pen, fore.get(device), BAR, width, scale);
  drawActs(pen, back.get(device), LANE, width, scale);
  drawLabels(pen, device, width, scale);
}

function ticks(from, to, num) {
  const raw = (to - from) / num;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= raw);
  const found = [];
  for (let x = Math.ceil(from / step) * step; x <= to; x += step) found.push(x);
  return found;
}

function drawAxis() {
  const { pen, width, scale } = prepared(byId("axis"), 22);
  pen.fillStyle = "#5c6875";
  pen.textBaseline = "top";
  for (const moment of ticks(view.from, view.to, Math.max(2, width / 140))) {
    const x = (moment - view.from) * scale;
    pen.fillRect(x, 15, 1, 7);
    pen.textAlign = x < 30 ? "left" : x > width - 40 ? "right" : "center";
    pen.fillText(secsText(Math.max(0, moment) / 1e9), x, 1);
  }
}

// --- memory ---

const LINES = ["#3b4cc0", "#2a9d6f", "#c9562c", "#7d5ba6", "#b08a00", "#0f8b9d", "#a03060", "#666"];
const colourOf = (i) => LINES[i % LINES.length];

function pointAt(line, moment) {
  let low = 0;
  let high = line.ns.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.ns[middle] <= moment) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

const largest = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 1);
const mostBytes = largest(memory.lines.map((line) => largest(line.bytes)));

function drawMemory() {
  const height = 240;
  const { pen, width, scale } = prepared(byId("memory"), height);
  // The limit is shown where it does not press the lines flat.
  const isNear = memory.limit < 2 * mostBytes;
  const top = isNear ? 1.08 * Math.max(memory.limit, mostBytes) : 1.15 * mostBytes;
  const y = (bytes) => height - 4 - (bytes / top) * (height - 10);
  pen.textBaseline = "bottom";
  pen.textAlign = "left";
  const unit = 1024 ** Math.floor(Math.log(top) / Math.log(1024));
  for (const size of ticks(0, top / unit, 5)) {
    pen.fillStyle = "#eef1f4";
    pen.fillRect(0, y(size * unit), width, 1);
    pen.fillStyle = "#8b96a2";
    if (y(size * unit) > 14) pen.fillText(bytesText(size * unit), 4, y(size * unit) - 1);
  }
  memory.lines.forEach((line, number) => {
    pen.strokeStyle = colourOf(number);
    pen.lineWidth = 1.4;
    pen.beginPath();
    let i = pointAt(line, view.from);
    pen.moveTo(0, y(line.bytes[i]));
    for (i += 1; i < line.ns.length && line.ns[i] <= view.to; i += 1) {
      const x = (line.ns[i] - view.from) * scale;
      pen.lineTo(x, y(line.bytes[i - 1]));
      pen.lineTo(x, y(line.bytes[i]));
    }
    pen.lineTo(width, y(line.bytes[i - 1]));
    pen.stroke();
  });
  if (isNear) {
    pen.fillStyle = "#c0392b";
    pen.fillRect(0, y(memory.limit), width, 1.5);
    pen.textAlign = "right";
    pen.fillText(`a device has ${bytesText(memory.limit)}`, width - 4, y(memory.limit) - 1);
  }
}

function drawAll() {
  drawAxis();
  for (const device of timeline.devices) drawRow(device);
  drawMemory();
}
