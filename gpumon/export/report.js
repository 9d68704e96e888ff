// The timeline of a gpumon report: draws the plot, moves its cursor, shows the chosen step. Python made all figures.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 260, LEFT = 76, RIGHT = 14, TOP = 18, BOTTOM = 34;
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  // a step: number, time, peak, reserved, unread steps before it, batch, seconds, phases, owners
  const STEP = 0, TIME = 1, PEAK = 2, RESERVED = 3, UNREAD = 4, BATCH = 5, SECONDS = 6, PHASES = 7, OWNERS = 8;

  function add(parent, name, text, attributes) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    return parent.appendChild(made);
  }

  function draw(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }

  function size(value, sign) { // as gpumon.analysis.units.size
    if (value === null) return "n/a";
    const bytes = Math.abs(value);
    let unit = 0;
    while (unit < 4 && Math.round(bytes / 1024 ** unit * 10) / 10 >= 1024) unit++;
    const scaled = bytes / 1024 ** unit;
    const digits = unit === 0 ? 0 : Math.round(scaled * 100) / 100 < 10 ? 2 : 1;
    const figure = scaled.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    return (value < 0 ? "−" : sign && value > 0 ? "+" : "") + figure + " " + UNITS[unit];
  }

  function duration(seconds) { // as gpumon.analysis.units.duration, of whole microseconds
    if (seconds === null) return "n/a";
    if (seconds < 1e-3) return (seconds * 1e6).toFixed(0) + " µs";
    if (seconds < 0.9995) return seconds * 1e3 < 9.95 ? (seconds * 1e3).toFixed(1) + " ms" : (seconds * 1e3).toFixed(0) + " ms";
    return seconds < 9.995 ? seconds.toFixed(2) + " s" : seconds.toFixed(0) + " s";
  }

  const count = (value) => value.toLocaleString("en");

  function bar(parent, parts) {
    const svg = draw(parent, "svg", { class: "bar", "aria-hidden": "true" });
    const total = parts.reduce((sum, part) => sum + Math.max(0, part[1]), 0);
    let x = 0;
    for (const [line, bytes] of parts) {
      const width = Math.max(0, bytes) / Math.max(1, total) * 100;
      const part = draw(svg, "rect", { x: `${x}%`, width: `${width}%`, height: "100%", class: "l-" + line });
      draw(part, "title", {}, line.replace(/_/g, " ") + " " + size(bytes));
      if (width >= data.letter_from) draw(svg, "text", { x: `${x + width / 2}%`, y: "68%" }, data.letters[line] || "");
      x += width;
    }
  }

  function table(parent, heads, rows) {
    const made = add(add(parent, "div", undefined, { class: "wide" }), "table");
    const head = add(made, "tr");
    heads.forEach((text, at) => add(head, "th", text, at ? { class: "number", scope: "col" } : { scope: "col" }));
    for (const row of rows) {
      const line = add(made, "tr");
      row.forEach((text, at) => add(line, "td", text, at ? { class: "number" } : {}));
    }
  }

  class Timeline {
    constructor(box, line) {
      this.line = line;
      this.steps = line.steps;
      this.box = box;
      this.detail = box.parentNode.querySelector(".chosen");
      this.highest = this.steps.reduce((best, step, at) => (step[PEAK] > this.steps[best][PEAK] ? at : best), 0);
      this.at = this.highest;
      this.svg = draw(box, "svg", {
        class: "plot", tabindex: 0, role: "slider", "aria-label": "step", "aria-valuemin": this.steps[0][STEP],
        "aria-valuemax": this.steps[this.steps.length - 1][STEP],
      });
      this.svg.addEventListener("keydown", (event) => this.key(event));
      this.svg.addEventListener("pointerdown", (event) => {
        this.svg.setPointerCapture(event.pointerId);
        this.point(event);
      });
      this.svg.addEventListener("pointermove", (event) => {
        if (this.svg.hasPointerCapture(event.pointerId)) this.point(event);
      });
      box.parentNode.querySelector(".highest").addEventListener("click", () => this.choose(this.highest));
      new ResizeObserver(() => this.plot()).observe(box);
      this.plot();
      this.choose(this.at);
    }

    x(step) { return LEFT + step / Math.max(1, this.last) * (this.width - LEFT - RIGHT); }
    y(bytes) { return HEIGHT - BOTTOM - bytes / this.top * (HEIGHT - TOP - BOTTOM); }

    plot() {
      const width = this.box.clientWidth;
      if (!width || width === this.width) return; // hidden, or drawn already
      this.width = width;
      const { steps, line } = this;
      this.last = Math.max(steps[steps.length - 1][STEP], line.oom ? line.oom.step : 0);
      const tallest = steps.reduce((most, step) => Math.max(most, step[PEAK], step[RESERVED]), 0);
      this.top = Math.max(1, line.to_capacity ? Math.max(line.capacity, tallest) : tallest) * 1.04;
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.axes();
      const along = (field) => steps.filter((step) => step[field] !== null)
        .map((step) => `${this.x(step[STEP]).toFixed(1)},${this.y(step[field]).toFixed(1)}`).join(" ");
      const peaks = along(PEAK);
      const from = this.x(steps[0][STEP]), to = this.x(steps[steps.length - 1][STEP]);
      draw(this.svg, "polygon", { class: "area", points: `${from},${this.y(0)} ${peaks} ${to},${this.y(0)}` });
      draw(this.svg, "polyline", { class: "reserved", points: along(RESERVED) });
      draw(this.svg, "polyline", { class: "peak", points: peaks });
      if (line.to_capacity) this.across("capacity", line.capacity);
      for (const mark of line.marks) this.mark(mark.step, "▾", mark.text);
      if (line.oom) this.mark(line.oom.step, "out of memory", line.oom.text);
      this.cursor = draw(this.svg, "line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
      this.dot = draw(this.svg, "circle", { class: "dot", r: 3.5 });
      this.place();
    }

    axes() {
      const ticks = 2 ** Math.ceil(Math.log2(this.top / 6));
      for (let bytes = 0; bytes <= this.top; bytes += ticks) {
        const y = this.y(bytes);
        draw(this.svg, "line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
        draw(this.svg, "text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, bytes ? size(bytes) : "0");
      }
      const rough = Math.max(1, this.last / (this.width / 110)), power = 10 ** Math.floor(Math.log10(rough));
      const every = [1, 2, 5, 10].find((times) => times * power >= rough) * power;
      for (let step = 0; step <= this.last; step += every) {
        draw(this.svg, "text", { x: this.x(step), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, count(step));
      }
      draw(this.svg, "text", { x: this.width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "step");
    }

    across(kind, bytes) {
      draw(this.svg, "line", { class: kind, x1: LEFT, x2: this.width - RIGHT, y1: this.y(bytes), y2: this.y(bytes) });
    }

    mark(step, text, title) {
      const x = this.x(step);
      draw(draw(this.svg, "line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), "title", {}, title);
      const anchor = x > this.width / 2 ? "end" : "start";
      draw(this.svg, "text", { class: "marked", x, y: TOP - 6, "text-anchor": text.length > 1 ? anchor : "middle" }, text);
    }

    place() {
      if (!this.cursor) return;
      const step = this.steps[this.at], x = this.x(step[STEP]);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
      this.dot.setAttribute("cx", x);
      this.dot.setAttribute("cy", this.y(step[PEAK] || 0));
    }

    point(event) {
      const shown = this.svg.getBoundingClientRect();
      const x = (event.clientX - shown.left) * this.width / shown.width;
      const step = (x - LEFT) / (this.width - LEFT - RIGHT) * this.last;
      this.choose(this.steps.reduce((best, each, at) =>
        Math.abs(each[STEP] - step) < Math.abs(this.steps[best][STEP] - step) ? at : best, 0));
    }

    key(event) {
      const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10,
        Home: -this.steps.length, End: this.steps.length }[event.key];
      if (by === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      this.choose(Math.min(this.steps.length - 1, Math.max(0, this.at + by)));
    }

    choose(at) {
      this.at = at;
      this.place();
      const { line, steps } = this, step = steps[at], text = data.text;
      this.svg.setAttribute("aria-valuenow", step[STEP]);
      this.svg.setAttribute("aria-valuetext", `step ${count(step[STEP])}, peak ${size(step[PEAK])}`);
      const box = this.detail;
      box.replaceChildren();
      add(box, "h3", `Step ${count(step[STEP])}: ${step[PEAK] === null ? "peak not read" : "peak " + size(step[PEAK])}`);
      const facts = [`reserved ${size(step[RESERVED])}`, duration(step[SECONDS])];
      if (step[TIME] !== null) facts.push(new Date(step[TIME]).toLocaleString());
      if (step[BATCH] !== null) facts.push("batch " + text[step[BATCH]]);
      if (step[UNREAD]) facts.push(`the peak includes ${step[UNREAD] > 1 ? count(step[UNREAD]) + " unread steps" : "an unread step"} before it`);
      add(box, "p", facts.join(" · "));
      table(box, ["phase", "start", "peak", "end", "change", "time", ""], step[PHASES].map((phase) => {
        const [name, times, start, peak, end, seconds, notes] = phase;
        const change = start === null || end === null ? null : end - start;
        return [text[name] + (times > 1 ? ` × ${times}` : ""), size(start), size(peak), size(end), size(change, true),
          duration(seconds), notes === null ? "" : text[notes]];
      }));
      if (!step[OWNERS]) return void add(box, "p", "Owners were not read in this step.", { class: "dim" });
      const [where, parts] = step[OWNERS];
      const named = parts.map(([name, bytes]) => [text[name], bytes]);
      add(box, "p", `By owner, ${text[where]}:`);
      bar(box, named);
      add(box, "p", named.map(([name, bytes]) => `${name.replace(/_/g, " ")} ${size(bytes)}`).join(" · "));
    }
  }

  const sections = [...document.querySelectorAll(".subject")];
  const made = new Map();

  function show(chosen) {
    sections.forEach((section, at) => { section.hidden = at !== chosen; });
    const box = sections[chosen] && sections[chosen].querySelector(".timeline");
    if (box && !made.has(chosen)) made.set(chosen, new Timeline(box, data.timelines[chosen]));
  }

  const chooser = document.getElementById("subject");
  if (chooser) chooser.addEventListener("change", () => show(chooser.selectedIndex));
  show(chooser ? chooser.selectedIndex : 0);

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((each) => { each.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((each) => { each.open = false; }));
})();
