// What devices do, by device, and what they do at a moment.

// Acts are columns of numbers, sorted by their start; times are nanoseconds.
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
