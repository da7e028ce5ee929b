// Zoom and pan.

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
  byId("memory").addEventListener("mousemove", (event) => {
    if (drag === null) hoverMemory(event);
  });
  for (const [device, canvas] of canvases) {
    canvas.addEventListener("mousemove", (event) => {
      if (drag === null) hoverRow(device, event);
    });
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
