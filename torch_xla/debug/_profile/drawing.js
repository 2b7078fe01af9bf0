"use strict";
// What the page of a profile and that of programs ahead of time share.
const drawing = (() => {
  const colors = {};
  const readColors = (names) => {
    const style = getComputedStyle(document.documentElement);
    for (const name of names) colors[name] = style.getPropertyValue("--" + name.replace(" ", "-")).trim();
  };

  const bytes = (n) => {
    for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (n >= unit) return (n / unit).toFixed(1) + " " + name;
    }
    return n + " B";
  };

  const fit = (canvas, height) => {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (height === undefined) height = canvas.dataset.height || (canvas.dataset.height = canvas.getAttribute("height"));
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    return [pen, width, Number(height)];
  };

  // Bytes over what passes, in steps: points are [when, bytes]; with a limit a line where it is.
  const memory = (canvas, points, length, what, end, limit = 0) => {
    const [pen, width, height] = fit(canvas), most = Math.max(1, ...points.map((p) => p[1]));
    const bottom = height - 18, room = bottom - 16, full = Math.max(most, limit && limit < 4 * most ? limit : 0);
    const x = (t) => (t / length) * (width - 2) + 1, y = (n) => bottom - (n / full) * room;
    pen.beginPath();
    pen.moveTo(x(0), bottom);
    let before = bottom;
    for (const [t, n] of points) {
      pen.lineTo(x(Math.min(t, length)), before);
      pen.lineTo(x(Math.min(t, length)), (before = y(n)));
    }
    pen.lineTo(x(length), before);
    pen.lineTo(x(length), bottom);
    pen.fillStyle = pen.strokeStyle = colors.record;
    pen.globalAlpha = 0.35;
    pen.fill();
    pen.globalAlpha = 1;
    pen.stroke();
    pen.fillStyle = colors.soft;
    let title = `${what}, up to ${bytes(most)}`;
    if (limit) title += ` of ${bytes(limit)}`;
    pen.fillText(title, 0, 8);
    if (limit && limit <= full) {
      pen.strokeStyle = colors.bad;
      pen.setLineDash([5, 4]);
      pen.beginPath();
      pen.moveTo(0, y(limit));
      pen.lineTo(width, y(limit));
      pen.stroke();
      pen.setLineDash([]);
    }
    pen.fillText("0", 0, height - 7);
    pen.fillText(end, width - pen.measureText(end).width, height - 7);
  };
  return { colors, readColors, bytes, fit, memory };
})();
