// Everything in its place.

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
  byId("shares").textContent = (
    `Of the step: ${shares.join(", ")}. Communication hidden ${share(page.overlap)}.`);
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
  for (const text of [...page.notes, ...page.assumptions]) {
    byId("notes").append(element("li", text));
  }
  peaksTable();
  edgesTable();
  layersTable();
  candidatesTable();
  listen();
  show(0, whole);
}

build();
