// What the reader points at, in words.

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
    ...lines.map(([text, kind]) => (
      kind === "bold" ? element("b", text) : element("div", text, kind)
    )),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  // Beside the pointer, on the side that has room.
  const beside = (at, size, end) => Math.max(0, at + 15 + size > end ? at - size - 10 : at + 15);
  tip.style.left = `${beside(event.clientX, width, innerWidth)}px`;
  tip.style.top = `${beside(event.clientY, height, innerHeight)}px`;
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
    const size = bytesText(line.bytes[pointAt(line, moment)]);
    lines.push([`${devicesText(line.devices)}: ${size}`, ""]);
  }
  if (memory.lines.length > 16) lines.push([`and ${memory.lines.length - 16} lines more`, "dim"]);
  showTip(event, lines);
}

function devicesText(devices) {
  if (devices.length === 1) return `device ${devices[0]}`;
  const names = devices.length > 6 ? [...devices.slice(0, 5), "..."] : devices;
  return `devices ${names.join(", ")}`;
}
