"use strict";
(() => {
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

  // --- texts ------------------------------------------------------------------------------------

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

  // --- acts of devices: columns of numbers, sorted by start -----------------------------------

  const FIELDS = { start: 0, end: 1, activity: 2, name: 3, segment: 4, edge: 5, run: 6 };

  function sorted(acts) {
    acts.sort((a, b) => a[FIELDS.start] - b[FIELDS.start]);
    return acts;
  }

  function actsByDevice() {
    const empty = () => new Map(timeline.devices.map((device) => [device, []]));
    const fore = empty();
    const back = empty();
    const activityOf = (name) => timeline.activities.findIndex(([each]) => each === name);
    timeline.runs.forEach(([, , , start, inside], run) => {
      for (const [kind, target] of [["spans", fore], ["beside", back]]) {
        for (const [group, activity, name, from, length, segment, edge] of
          timeline.insides[inside][kind]) {
          const act = [start + from, start + from + length, activity, name, segment, edge, run];
          for (const device of timeline.groups[group]) target.get(device).push(act);
        }
      }
    });
    const hidden = activityOf("communication in the background");
    for (const [group, name, microbatch, start, length, edge] of timeline.sends) {
      const act = [start, start + length, hidden, name, -1, edge, -1 - microbatch];
      for (const device of timeline.groups[group]) back.get(device).push(act);
    }
    const waits = activityOf("communication");
    for (const [device, start, length] of timeline.waits) {
      fore.get(device).push([start, start + length, waits, -1, -1, -1, NaN]);
    }
    for (const acts of [...fore.values(), ...back.values()]) sorted(acts);
    return { fore, back };
  }

  const { fore, back } = actsByDevice();

  // Index of the first act that ends after a moment. Acts of a lane seldom overlap, so a short
  // walk back finds those that began long before.
  function firstAfter(acts, moment) {
    let low = 0;
    let high = acts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (acts[middle][FIELDS.start] <= moment) low = middle + 1;
      else high = middle;
    }
    let i = low;
    for (let steps = 0; i > 0 && steps < 64; steps += 1) {
      if (acts[i - 1][FIELDS.end] <= moment && steps > 8) break;
      i -= 1;
    }
    return i;
  }

  function actAt(acts, moment) {
    for (let i = firstAfter(acts, moment); i < acts.length; i += 1) {
      if (acts[i][FIELDS.start] > moment) return null;
      if (acts[i][FIELDS.end] > moment) return acts[i];
    }
    return null;
  }

  // --- the part of the step that is shown -------------------------------------------------------

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

  // --- canvases ---------------------------------------------------------------------------------

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

  // --- memory -----------------------------------------------------------------------------------

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

  const mostBytes = Math.max(1, ...memory.lines.map((line) => line.bytes.reduce((a, b) => Math.max(a, b), 0)));

  function drawMemory() {
    const height = 240;
    const { pen, width, scale } = prepared(byId("memory"), height);
    // The limit is shown where it does not press the lines flat.
    const top = memory.limit < 2 * mostBytes ? 1.08 * Math.max(memory.limit, mostBytes) : 1.15 * mostBytes;
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
    if (memory.limit < 2 * mostBytes) {
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

  // --- hover ------------------------------------------------------------------------------------

  const MAX_OPS = 14;

  function decisionText(number) {
    const [annotation, split, again, offloaded, stage, devices] = decisions.decisions[number];
    const words = [split, `devices ${devices}`];
    if (stage >= 0) words.push(`stage ${stage}`);
    if (again && !split.includes("again")) words.push("recomputed");
    if (offloaded && !split.includes("swapped")) words.push("offloaded");
    return { annotation, text: words.join(", ") };
  }

  function* opLines(ops) {
    let layer = -1;
    for (const op of ops.slice(0, MAX_OPS)) {
      const [its, name, decision] = decisions.ops[op];
      if (its !== layer) yield [decisions.layers[its], "bold"];
      layer = its;
      yield [`${name}: ${decisionText(decision).text}`, ""];
    }
    if (ops.length > MAX_OPS) yield [`and ${ops.length - MAX_OPS} ops more`, "dim"];
  }

  function edgeLine(number) {
    const row = edges[number];
    return `${row.edge || row.tensors}: ${row.what}; ${row.by}, ${bytesText(row.bytes)} a step`;
  }

  function tipOf(act, device, moment) {
    const [start, end, activity, name, segment, edge, run] = act;
    const lines = [];
    if (Number.isNaN(run)) {
      lines.push([`device ${device} waits for a tensor of another stage`, "bold"]);
    } else if (run < 0) {
      lines.push([`transfer between stages: ${timeline.names[name]}`, "bold"]);
      lines.push([`microbatch ${-1 - run}`, ""]);
    } else {
      const [title, stage, microbatch] = timeline.runs[run];
      const what = timeline.activities[activity][0];
      const where = stage >= 0 ? ` of stage ${stage}` : "";
      const which = microbatch >= 0 ? `, microbatch ${microbatch}` : "";
      lines.push([`${timeline.names[title]}${where}${which} on device ${device}`, "bold"]);
      lines.push([`${what}: ${timeline.names[name]}`, ""]);
    }
    lines.push([`${secsText((end - start) / 1e9)}, from ${secsText(start / 1e9)}`, "dim"]);
    if (edge >= 0) {
      lines.push([edgeLine(edge), ""]);
      for (const text of edges[edge].words) lines.push([text, "dim"]);
    }
    if (segment >= 0) lines.push(...opLines(decisions.segments[segment]));
    const line = memory.lines.find((each) => each.devices.includes(device));
    if (line) lines.push([`memory ${bytesText(line.bytes[pointAt(line, moment)])}`, "dim"]);
    return lines;
  }

  function showTip(event, lines) {
    const tip = byId("tip");
    tip.replaceChildren(
      ...lines.map(([text, kind]) => element(kind === "bold" ? "b" : "div", text, kind === "dim" ? "dim" : "")),
    );
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 10 : event.clientX + 14;
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, top)}px`;
  }

  const hideTip = () => { byId("tip").hidden = true; };

  function momentAt(canvas, event) {
    const box = canvas.getBoundingClientRect();
    return view.from + ((event.clientX - box.left) / Math.max(1, box.width)) * (view.to - view.from);
  }

  function hoverRow(device, event) {
    const canvas = canvases.get(device);
    const moment = momentAt(canvas, event);
    const isLane = event.clientY - canvas.getBoundingClientRect().top >= LANE.top - 1;
    const act = actAt((isLane ? back : fore).get(device), moment);
    if (act === null) hideTip();
    else showTip(event, tipOf(act, device, moment));
  }

  function hoverMemory(event) {
    const moment = momentAt(byId("memory"), event);
    const lines = [[secsText(moment / 1e9), "bold"]];
    for (const line of memory.lines.slice(0, 16)) {
      lines.push([`${devicesText(line.devices)}: ${bytesText(line.bytes[pointAt(line, moment)])}`, ""]);
    }
    if (memory.lines.length > 16) lines.push([`and ${memory.lines.length - 16} lines more`, "dim"]);
    showTip(event, lines);
  }

  function devicesText(devices) {
    if (devices.length === 1) return `device ${devices[0]}`;
    const names = devices.length > 6 ? [...devices.slice(0, 5), "..."] : devices;
    return `devices ${names.join(", ")}`;
  }

  // --- zoom and pan -----------------------------------------------------------------------------

  function listen() {
    const plots = byId("plots");
    let drag = null;
    plots.addEventListener("wheel", (event) => {
      if (event.shiftKey || !(event.target instanceof HTMLCanvasElement)) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const moved = (event.deltaX / 1000) * (view.to - view.from);
        show(view.from + moved, view.to + moved);
      } else {
        zoom(1.0015 ** event.deltaY, momentAt(event.target, event));
      }
    }, { passive: false });
    plots.addEventListener("mousedown", (event) => {
      if (!(event.target instanceof HTMLCanvasElement)) return;
      drag = { x: event.clientX, from: view.from, to: view.to, width: event.target.clientWidth };
      event.preventDefault();
    });
    window.addEventListener("mousemove", (event) => {
      if (drag === null) return;
      hideTip();
      const moved = ((drag.x - event.clientX) / Math.max(1, drag.width)) * (drag.to - drag.from);
      show(drag.from + moved, drag.to + moved);
    });
    window.addEventListener("mouseup", () => { drag = null; });
    plots.addEventListener("dblclick", (event) => {
      if (event.target instanceof HTMLCanvasElement) zoom(0.4, momentAt(event.target, event));
    });
    plots.addEventListener("mouseleave", hideTip);
    byId("memory").addEventListener("mousemove", (event) => { if (drag === null) hoverMemory(event); });
    for (const [device, canvas] of canvases) {
      canvas.addEventListener("mousemove", (event) => { if (drag === null) hoverRow(device, event); });
      canvas.addEventListener("mouseleave", hideTip);
    }
    byId("memory").addEventListener("mouseleave", hideTip);
    byId("zoom-in").addEventListener("click", () => zoom(0.5));
    byId("zoom-out").addEventListener("click", () => zoom(2));
    byId("zoom-all").addEventListener("click", () => show(0, whole));
    const step = (sign) => {
      const moved = 0.2 * sign * (view.to - view.from);
      show(view.from + moved, view.to + moved);
    };
    const keys = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, whole),
      ArrowLeft: () => step(-1), ArrowRight: () => step(1),
    };
    window.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      keys[event.key]();
      event.preventDefault();
    });
    window.addEventListener("resize", redrawSoon);
  }

  // --- tables -----------------------------------------------------------------------------------

  // A column is [title, value to sort by, text to show, whether it is a number].
  function table(target, columns, rows, { details = null, classOf = () => "", sortBy = -1 } = {}) {
    const made = element("table");
    const head = made.createTHead().insertRow();
    const body = made.createTBody();
    let order = { column: sortBy, sign: -1 };
    const fill = () => {
      const shown = [...rows];
      if (order.column >= 0) {
        const key = columns[order.column][1];
        shown.sort((a, b) => (key(a) < key(b) ? -order.sign : key(a) > key(b) ? order.sign : 0));
      }
      body.replaceChildren();
      for (const row of shown) {
        const line = body.insertRow();
        line.className = `${classOf(row)}${details ? " opens" : ""}`.trim();
        for (const [, , text, isNumber] of columns) {
          line.append(element("td", text(row), isNumber ? "number" : ""));
        }
        if (details) line.addEventListener("click", () => open(line, row));
      }
      columns.forEach((_, i) => {
        const cell = head.cells[i];
        if (i === order.column) cell.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
        else cell.removeAttribute("aria-sort");
      });
    };
    const open = (line, row) => {
      const next = line.nextElementSibling;
      if (next !== null && next.classList.contains("details")) {
        next.remove();
        return;
      }
      const more = element("tr", "", "details");
      const cell = element("td", "", "detail");
      cell.colSpan = columns.length;
      cell.append(...details(row));
      more.append(cell);
      line.after(more);
    };
    columns.forEach(([title, , , isNumber], i) => {
      const cell = element("th", title, isNumber ? "number" : "");
      cell.addEventListener("click", () => {
        const again = order.column === i;
        order = { column: i, sign: again ? -order.sign : isNumber ? -1 : 1 };
        fill();
      });
      head.append(cell);
    });
    fill();
    target.append(made);
  }

  function edgesTable() {
    const levels = page.levels.map((name) => [
      `between ${name}s`, (row) => row.levels[name] || 0, (row) => bytesText(row.levels[name] || 0), true,
    ]);
    table(byId("edges"), [
      ["edge", (row) => row.edge, (row) => row.edge],
      ["moves", (row) => row.what, (row) => row.what],
      ["tensors", (row) => row.tensors, (row) => row.tensors],
      ["stages", (row) => row.stages, (row) => row.stages],
      ["by", (row) => row.by, (row) => row.by],
      ["count", (row) => row.count, (row) => String(row.count), true],
      ["times", (row) => row.times, (row) => String(row.times), true],
      ["bytes a step", (row) => row.bytes, (row) => bytesText(row.bytes), true],
      ...(levels.length > 1 ? levels : []),
      ["time a step", (row) => row.secs, (row) => secsText(row.secs), true],
    ], edges, {
      sortBy: 7,
      details: (row) => [
        ...row.words.map((text) => element("p", text)),
        element("p", `Tensors: ${row.members.join(", ")}${row.count > row.members.length ? ", ..." : ""}`),
      ],
    });
  }

  function layersTable() {
    const rows = decisions.layers.map((name) => ({ name, ops: [] }));
    decisions.ops.forEach(([layer, name, decision]) => rows[layer].ops.push([name, decision]));
    for (const row of rows) {
      const found = row.ops.map(([, number]) => decisions.decisions[number]);
      const all = (values) => [...new Set(values)].join("; ");
      row.splits = all(found.map((each) => each[1]).filter((split) => split !== "whole")) || "whole";
      row.recomputed = found.filter((each) => each[2]).length;
      row.offloaded = found.filter((each) => each[3]).length;
      row.stages = all(found.map((each) => each[4]).filter((stage) => stage >= 0));
      row.devices = all(found.map((each) => each[5]));
    }
    const target = byId("layers");
    if (rows.length > 12) target.className = "scroll";
    const of = (num, row) => (num ? `${num} of ${row.ops.length}` : "");
    table(target, [
      ["layer", (row) => rows.indexOf(row), (row) => row.name],
      ["ops", (row) => row.ops.length, (row) => String(row.ops.length), true],
      ["split", (row) => row.splits, (row) => row.splits],
      ["recomputed", (row) => row.recomputed, (row) => of(row.recomputed, row)],
      ["offloaded", (row) => row.offloaded, (row) => of(row.offloaded, row)],
      ["stages", (row) => row.stages, (row) => row.stages],
      ["devices", (row) => row.devices, (row) => row.devices],
    ], rows, {
      details: (row) => row.ops.map(([name, decision]) => {
        const { annotation, text } = decisionText(decision);
        return element("p", `${name}  (${annotation}): ${text}`);
      }),
    });
  }

  function candidatesTable() {
    if (page.candidates.length === 0) return;
    byId("search").hidden = false;
    const target = byId("candidates");
    if (page.candidates.length > 14) target.className = "scroll";
    const verdict = (row) => (row.chosen ? "chosen" : row.fits ? "fits" : row.why);
    const secs = (row) => (row.secs === null ? Infinity : row.secs);
    table(target, [
      ["plan", (row) => row.name, (row) => row.name],
      ["step", secs, (row) =>
        (row.secs === null ? "" : `${row.estimate ? "about " : ""}${secsText(row.secs)}`), true],
      ["memory", (row) => row.bytes, (row) => (row.bytes ? bytesText(row.bytes) : ""), true],
      ["fits", (row) => (row.fits ? 0 : 1), (row) => (row.fits ? "yes" : "no")],
      ["verdict", verdict, verdict],
    ], page.candidates, {
      classOf: (row) => (row.chosen ? "chosen" : row.fits ? "" : "refused"),
    });
  }

  function peaksTable() {
    const kinds = [...new Set(memory.peaks.flatMap(([, by]) => Object.keys(by)))];
    const merged = new Map();
    for (const [device, by, peak] of memory.peaks) {
      const key = JSON.stringify([by, peak]);
      if (!merged.has(key)) merged.set(key, { devices: [], by, peak });
      merged.get(key).devices.push(device);
    }
    table(byId("peaks"), [
      ["at the peak", (row) => row.devices[0], (row) => devicesText(row.devices)],
      ...kinds.map((kind) => [kind, (row) => row.by[kind] || 0, (row) => bytesText(row.by[kind] || 0), true]),
      ["peak", (row) => row.peak, (row) => bytesText(row.peak), true],
    ], [...merged.values()]);
  }

  // --- all of it --------------------------------------------------------------------------------

  function key(colour, text) {
    const made = element("span", "", "key");
    const mark = element("i");
    mark.style.background = colour;
    made.append(mark, text);
    return made;
  }

  function build() {
    byId("headline").textContent = page.headline;
    byId("plan").textContent = page.plan;
    const shares = Object.entries(page.shares).map(([name, x]) => `${name} ${share(x)}`);
    byId("shares").textContent = `Of the step: ${shares.join(", ")}. Communication hidden ${share(page.overlap)}.`;
    const used = new Set();
    for (const acts of [...fore.values(), ...back.values()]) {
      for (const act of acts) used.add(act[FIELDS.activity]);
    }
    timeline.activities.forEach(([name, colour], i) => {
      if (used.has(i)) byId("legend").append(key(colour, name));
    });
    for (const device of timeline.devices) {
      const row = element("div", "", "row");
      row.dataset.device = device;
      const canvas = element("canvas");
      canvas.height = ROW_HEIGHT;
      canvases.set(device, canvas);
      row.append(element("span", `device ${device}`, "label"), canvas);
      byId("rows").append(row);
    }
    memory.lines.slice(0, 16).forEach((line, i) => {
      byId("memory-legend").append(key(colourOf(i), devicesText(line.devices)));
    });
    for (const text of [...page.notes, ...page.assumptions]) byId("notes").append(element("li", text));
    peaksTable();
    edgesTable();
    layersTable();
    candidatesTable();
    listen();
    show(0, whole);
  }

  build();
})();
