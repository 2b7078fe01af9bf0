"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const texts = data.texts, stages = data.stages, length = Math.max(data.length, 1);
  const { colors, fit } = drawing;
  const readColors = () => drawing.readColors([...stages, "execute", "text", "soft", "line", "card", "page"]);

  const time = (us) => {
    const a = Math.abs(us);
    if (a >= 1e6) return (us / 1e6).toFixed(2) + " s";
    if (a >= 1e3) return (us / 1e3).toFixed(a < 1e4 ? 2 : 1) + " ms";
    return Math.round(us) + " µs";
  };
  // A moment on the axis, as exact as the distance to the next one asks.
  const label = (us, step) => {
    const [unit, name] = us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    return (us / unit).toFixed(Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9))) + " " + name;
  };
  // Lanes: rows of pieces {start, length, stage, label, what}, sorted and without overlaps inside a row.
  const lanes = [];
  const lane = (name, height, pieces) => lanes.push({ name, height, pieces });
  for (const [device, runs, gaps] of data.devices) {
    const pieces = runs.map(([start, length, key, line]) => ({
      start, length, stage: "execute", label: texts[key], what: `program ${texts[key]}`, line: texts[line],
    }));
    for (const [start, length, stage, name, line] of gaps) {
      pieces.push({ start, length, stage: stages[stage], idle: true, label: texts[name], what: `idle: ${texts[name]}`, line: texts[line] });
    }
    pieces.sort((a, b) => a.start - b.start);
    lane(`xla:${device}`, 34, pieces);
  }
  const segments = (rows) => rows.map(([start, length, stage, line, why]) => ({
    start, length, stage: stages[stage], label: stages[stage], what: stages[stage], line: texts[line], why: texts[why],
  }));
  lane("host", 34, segments(data.host));
  const deepest = Math.min(data.calls.reduce((most, call) => Math.max(most, call[3]), -1), 7);
  for (let depth = 0; depth <= deepest; depth++) {
    lane(depth ? "" : "modules", 17, data.calls.filter((call) => call[3] === depth).map(([start, length, name]) => ({
      start, length, stage: "record", module: true, label: texts[name].split("/").slice(depth ? -1 : 0).join("/"), what: `forward of ${texts[name]}`,
    })));
  }
  for (const [name, rows] of data.others) lane(name, 20, segments(rows));

  const gutter = () => (lanesCanvas.clientWidth < 560 ? 56 : 92);
  const lanesCanvas = $("lanes"), stepsCanvas = $("steps"), liveCanvas = $("live");
  const top = 20, between = 4;
  const view = { from: 0, to: length };
  const hidden = new Set();
  let filter = "", selected = null;

  const matches = (piece) => !filter || [piece.what, piece.line, piece.why].some((t) => t && t.toLowerCase().includes(filter));
  const shown = (piece) => piece.module || piece.idle || !hidden.has(piece.stage);
  // Index of the first piece that ends after a moment.
  const first = (pieces, moment) => {
    let low = 0, high = pieces.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pieces[middle].start + pieces[middle].length > moment) high = middle; else low = middle + 1;
    }
    return low;
  };

  const tick = (span, count) => {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= raw);
  };

  const stripes = (pen, x, y, w, h) => {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, w, h);
    pen.clip();
    pen.strokeStyle = colors.card;
    pen.lineWidth = 2;
    pen.beginPath();
    for (let i = x - h; i < x + w; i += 8) {
      pen.moveTo(i, y + h);
      pen.lineTo(i + h, y);
    }
    pen.stroke();
    pen.restore();
  };

  const drawLanes = () => {
    const height = lanes.reduce((sum, row) => sum + row.height + between, top + 4);
    const [pen, width] = fit(lanesCanvas, height);
    const left = gutter(), scale = (width - left) / (view.to - view.from);
    const x = (moment) => left + (moment - view.from) * scale;
    pen.fillStyle = colors.soft;
    pen.strokeStyle = colors.line;
    const step = tick(view.to - view.from, Math.max(2, (width - left) / 110));
    for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
      pen.beginPath();
      pen.moveTo(x(at), top - 4);
      pen.lineTo(x(at), height);
      pen.stroke();
      pen.fillText(label(at, step), x(at) + 3, 8);
    }
    let y = top;
    for (const row of lanes) {
      let last = -1;
      for (let i = first(row.pieces, view.from); i < row.pieces.length && row.pieces[i].start < view.to; i++) {
        const piece = row.pieces[i];
        if (!shown(piece)) continue;
        const begin = Math.max(x(piece.start), left), end = Math.min(x(piece.start + piece.length), width);
        // Pieces thinner than a pixel are drawn once per pixel.
        if (end - last < 0.7 && piece !== selected) continue;
        const w = Math.max(end - begin, 1);
        last = begin + w;
        pen.globalAlpha = (matches(piece) ? 1 : 0.13) * (piece.idle ? 0.55 : piece.module ? 0.75 : 1);
        pen.fillStyle = colors[piece.stage];
        pen.fillRect(begin, y, w > 3 ? w - 0.7 : w, row.height);
        if (piece.idle && w > 4) stripes(pen, begin, y, w - 0.7, row.height);
        if (w > 34) {
          pen.save();
          pen.beginPath();
          pen.rect(begin, y, w - 3, row.height);
          pen.clip();
          pen.globalAlpha = matches(piece) ? 1 : 0.2;
          if (piece.idle) {
            pen.fillStyle = colors.card;
            pen.fillRect(begin, y + row.height / 2 - 8, Math.min(pen.measureText(piece.label).width + 10, w), 16);
          }
          pen.fillStyle = piece.idle ? colors.text : "#fff";
          pen.fillText(piece.label, begin + 5, y + row.height / 2 + 0.5);
          pen.restore();
        }
        pen.globalAlpha = 1;
        if (piece === selected) {
          pen.strokeStyle = colors.text;
          pen.lineWidth = 2;
          pen.strokeRect(begin + 1, y + 1, Math.max(w - 2, 1), row.height - 2);
          pen.lineWidth = 1;
        }
      }
      pen.fillStyle = colors.card;
      pen.fillRect(0, y, left, row.height);
      pen.fillStyle = colors.text;
      pen.fillText(row.name, 0, y + row.height / 2, left - 6);
      y += row.height + between;
    }
    stepMark();
  };

  // Steps: a bar each, stages stacked; those far above the others are cut off and say so.
  const steps = data.steps;
  const warm = () => {
    const usual = steps.filter((s) => s[5] && !s[4]);
    return (usual.length ? usual : steps).slice().sort((a, b) => a[1] - b[1]);
  };
  let stepWidth = 1;
  const drawSteps = () => {
    if (!steps.length) return;
    const [pen, width, height] = fit(stepsCanvas);
    const bars = height - 26, usual = warm();
    const median = usual[usual.length >> 1][1];
    const ceiling = Math.min(Math.max(...steps.map((s) => s[1])), median * 5) || 1;
    stepWidth = Math.min(width / steps.length, 40);
    steps.forEach((s, i) => {
      let y = bars;
      const scale = bars / Math.max(s[1], ceiling);
      s[2].forEach((spent, stage) => {
        const h = spent * scale;
        pen.fillStyle = colors[stages[stage]];
        pen.fillRect(i * stepWidth, y - h, Math.max(stepWidth - 1, 0.8), h);
        y -= h;
      });
      pen.fillStyle = colors.execute;
      pen.fillRect(i * stepWidth, bars + 2, Math.max(stepWidth - 1, 0.8) * Math.min(s[3] / Math.max(s[1], 1), 1), 4);
      if (s[1] > ceiling) {
        pen.fillStyle = colors.card;
        pen.fillRect(i * stepWidth, 7, stepWidth, 2);
        pen.fillRect(i * stepWidth, 11, stepWidth, 2);
      }
    });
    pen.fillStyle = colors.soft;
    pen.fillText(`${steps.length} steps, up to ${time(ceiling)}${ceiling < Math.max(...steps.map((s) => s[1])) ? "; cut bars are longer" : ""}; green: the device was busy`, 0, height - 7);
  };
  const stepMark = () => {
    if (!steps.length) return;
    drawSteps();
    const inside = steps.map((s, i) => [s, i]).filter(([s]) => s[0] < view.to && s[0] + s[1] > view.from).map(([, i]) => i);
    if (!inside.length || inside.length === steps.length) return;
    const pen = stepsCanvas.getContext("2d");
    pen.strokeStyle = colors.text;
    pen.strokeRect(inside[0] * stepWidth + 0.5, 0.5, Math.max(inside.length * stepWidth - 2, 2), stepsCanvas.clientHeight - 26);
  };

  const drawLive = () => drawing.memory(liveCanvas, data.live, length, "live tensors", time(length));

  let drawn = false;
  const draw = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      drawLanes();
      document.body.dataset.view = `${Math.round(view.from)} ${Math.round(view.to)}`;
    });
  };
  const look = (from, to) => {
    const span = Math.min(Math.max(to - from, 20), length);
    const middle = Math.min(Math.max((from + to) / 2, span / 2), length - span / 2);
    view.from = middle - span / 2;
    view.to = middle + span / 2;
    draw();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) =>
    look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const move = (part) => look(view.from + (view.to - view.from) * part, view.to + (view.to - view.from) * part);
  const around = (start, span) => look(start - span * 0.15 - 5, start + span * 1.15 + 5);
  const moment = (event) => {
    const box = lanesCanvas.getBoundingClientRect(), left = gutter();
    return view.from + ((event.clientX - box.left - left) / (box.width - left)) * (view.to - view.from);
  };

  const pieceAt = (event) => {
    let y = event.clientY - lanesCanvas.getBoundingClientRect().top - top;
    for (const row of lanes) {
      if (y >= 0 && y < row.height) {
        const at = moment(event), slack = ((view.to - view.from) / lanesCanvas.clientWidth) * 2;
        let best = null;
        for (let i = first(row.pieces, at - slack); i < row.pieces.length && row.pieces[i].start <= at + slack; i++) {
          if (shown(row.pieces[i]) && (!best || row.pieces[i].length > best.length)) best = row.pieces[i];
        }
        return best;
      }
      y -= row.height + between;
    }
    return null;
  };
  const tell = (piece) => {
    selected = piece;
    const box = $("detail");
    box.textContent = "";
    if (!piece) {
      box.textContent = "Click a piece of the timeline.";
    } else {
      const title = document.createElement("b");
      title.textContent = piece.what;
      const rest = [`${time(piece.length)} from ${time(piece.start)} on`, piece.line && `at ${piece.line}`, piece.why && `asked for: ${piece.why}`];
      box.append(title, " · " + rest.filter(Boolean).join(" · "));
    }
    draw();
  };

  // Mouse, keys and buttons.
  lanesCanvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / 1000); else zoom(Math.exp(event.deltaY / 400), moment(event));
  }, { passive: false });
  let grabbed = null;
  lanesCanvas.addEventListener("pointerdown", (event) => {
    grabbed = { x: event.clientX, from: view.from, to: view.to, moved: false };
    lanesCanvas.setPointerCapture(event.pointerId);
  });
  lanesCanvas.addEventListener("pointermove", (event) => {
    if (!grabbed) return;
    const by = event.clientX - grabbed.x;
    if (Math.abs(by) > 3) grabbed.moved = true;
    if (!grabbed.moved) return;
    const shift = (by / (lanesCanvas.clientWidth - gutter())) * (grabbed.to - grabbed.from);
    look(grabbed.from - shift, grabbed.to - shift);
  });
  lanesCanvas.addEventListener("pointerup", (event) => {
    if (grabbed && !grabbed.moved) tell(pieceAt(event));
    grabbed = null;
  });
  lanesCanvas.addEventListener("dblclick", (event) => {
    const piece = pieceAt(event);
    if (piece) around(piece.start, piece.length);
  });
  lanesCanvas.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), Escape: () => look(0, length) };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });
  stepsCanvas.addEventListener("click", (event) => {
    const step = steps[Math.floor((event.clientX - stepsCanvas.getBoundingClientRect().left) / stepWidth)];
    if (step) around(step[0], step[1]);
  });
  $("zoom-in").onclick = () => zoom(0.5);
  $("zoom-out").onclick = () => zoom(2);
  $("left").onclick = () => move(-0.5);
  $("right").onclick = () => move(0.5);
  $("whole").onclick = () => look(0, length);
  $("typical").onclick = () => {
    const usual = warm(), step = usual[usual.length >> 1];
    if (step) around(step[0], step[1]);
  };
  $("slowest").onclick = () => {
    const step = steps.slice().sort((a, b) => b[1] - a[1])[0];
    if (step) around(step[0], step[1]);
  };
  $("filter").oninput = (event) => {
    filter = event.target.value.trim().toLowerCase();
    draw();
  };
  const used = new Set([...data.host.map((s) => s[2]), ...data.others.flatMap(([, rows]) => rows.map((s) => s[2]))]);
  stages.forEach((stage, i) => {
    if (!used.has(i)) return;
    const chip = document.createElement("button"), dot = document.createElement("i");
    dot.className = `dot s-${stage.replace(" ", "-")}`;
    chip.append(dot, stage);
    chip.title = `show or hide ${stage}`;
    chip.dataset.stage = stage;
    chip.setAttribute("aria-pressed", "true");
    chip.onclick = () => {
      const show = hidden.delete(stage);
      if (!show) hidden.add(stage);
      chip.setAttribute("aria-pressed", String(show));
      draw();
    };
    $("chips").append(chip);
  });
  for (const row of document.querySelectorAll("tr.go")) {
    const go = (event) => {
      if (event.target.closest("details")) return;
      around(Number(row.dataset.start), Number(row.dataset.length));
      $("timeline").scrollIntoView({ block: "start" });
    };
    row.onclick = go;
    row.onkeydown = (event) => event.key === "Enter" && go(event);
  }

  const all = () => {
    readColors();
    drawLive();
    draw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  addEventListener("resize", all);
  all();
})();
