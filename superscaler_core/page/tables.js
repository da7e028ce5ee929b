// Tables that can be sorted, with rows that open.

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
      const way = order.sign > 0 ? "ascending" : "descending";
      if (i === order.column) cell.setAttribute("aria-sort", way);
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
    `between ${name}s`,
    (row) => row.levels[name] || 0,
    (row) => bytesText(row.levels[name] || 0),
    true,
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
      element("p", `Tensors: ${row.members.join(", ")}`
        + (row.count > row.members.length ? ", ..." : "")),
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
    ...kinds.map((kind) => [
      kind, (row) => row.by[kind] || 0, (row) => bytesText(row.by[kind] || 0), true,
    ]),
    ["peak", (row) => row.peak, (row) => bytesText(row.peak), true],
  ], [...merged.values()]);
}
