// What the page does beyond showing: tips at the pointer, zooming of the timeline, the theme. Works without it too.
"use strict";
const root = document.documentElement;
root.classList.add("scripted");

// Tips: the browser's own come late, so each title is taken out of its shape when first pointed at.
const tip = document.getElementById("tip");
function told(shape) {
  const title = shape.querySelector(":scope > title");
  if (title) { shape.tip = title.textContent; title.remove(); }
  return shape.tip;
}
document.addEventListener("pointermove", (event) => {
  const shape = event.target.closest ? event.target.closest("rect") : null;
  const text = shape && !event.buttons ? told(shape) : "";
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
});

document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.body).colorScheme === "dark" ||
    (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
});

const plot = document.querySelector("svg.plot");
if (plot) zoomable(plot);

function zoomable(svg) {
  const space = "http://www.w3.org/2000/svg";
  const left = +svg.dataset.left, width = +svg.dataset.plot, length = +svg.dataset.length;
  const top = +svg.dataset.top, bottom = +svg.dataset.bottom;
  const axis = svg.querySelector(".axis");
  // Where everything lies unzoomed, as parts of the whole width.
  const bars = [...svg.querySelectorAll(".zoomable rect")].map((shape) =>
    ({ shape, at: (+shape.getAttribute("x") - left) / width, size: +shape.getAttribute("width") / width }));
  const marks = [...svg.querySelectorAll(".marks > *")].map((shape) => {
    const name = shape.tagName === "line" ? "x1" : "x", x = +shape.getAttribute(name);
    const shift = shape.tagName === "line" ? 0 : shape.classList.contains("end") ? -5 : 5;
    return { shape, at: (x - shift - left) / width, shift };
  });
  let from = 0, to = 1;

  function show(a, b) {
    const size = Math.min(1, Math.max(b - a, 1e-5));
    from = Math.min(Math.max(0, a), 1 - size); to = from + size;
    svg.querySelectorAll(".zoomable text").forEach((text) => text.remove());
    for (const bar of bars) {
      const shown = bar.at <= to && bar.at + bar.size >= from;
      bar.shape.style.display = shown ? "" : "none";
      if (shown) lay(bar);
    }
    for (const mark of marks) {
      const x = left + (mark.at - from) / (to - from) * width;
      mark.shape.style.display = x < left - 1 || x > left + width + 1 ? "none" : "";
      for (const name of mark.shape.tagName === "line" ? ["x1", "x2"] : ["x"]) {
        mark.shape.setAttribute(name, x + mark.shift);
      }
    }
    ticks();
  }

  function lay(bar) {
    // Clamped to the plot: names stay visible in bars that begin left of it.
    const start = Math.max(left, left + (bar.at - from) / (to - from) * width);
    const stop = Math.min(left + width, left + (bar.at + bar.size - from) / (to - from) * width);
    bar.shape.setAttribute("x", start);
    bar.shape.setAttribute("width", Math.max(0.6, stop - start));
    bar.shape.classList.toggle("thin", stop - start < 3);
    const height = +bar.shape.getAttribute("height");
    if (height < 9 || stop - start < 12) return;
    const first = (told(bar.shape) || "").split("\n")[0], name = first.slice(first.indexOf(" ") + 1);
    if (name.length * 5.9 + 6 > stop - start) return;
    const text = document.createElementNS(space, "text");
    text.setAttribute("class", "name " + bar.shape.getAttribute("class").replace("bar ", ""));
    text.setAttribute("x", start + 4);
    text.setAttribute("y", +bar.shape.getAttribute("y") + height / 2 + 3.5);
    text.textContent = name;
    bar.shape.after(text);
  }

  function ticks() {
    axis.replaceChildren();
    const low = from * length, high = to * length;
    const least = (high - low) / 8, power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 2.5, 5, 10].find((factor) => power * factor >= least * (1 - 1e-9));
    const [unit, scale] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]].find((u) => high >= u[1]) || ["ns", 1e-9];
    for (let place = Math.ceil(low / step - 1e-9); place * step <= high * (1 + 1e-9); place++) {
      const x = left + (place * step - low) / (high - low) * width;
      const line = document.createElementNS(space, "line"), text = document.createElementNS(space, "text");
      for (const [name, value] of Object.entries({ x1: x, x2: x, y1: top, y2: bottom })) line.setAttribute(name, value);
      line.setAttribute("class", "grid");
      text.setAttribute("class", "faint middle");
      text.setAttribute("x", x); text.setAttribute("y", bottom + 15);
      text.textContent = place ? +(place * step / scale).toPrecision(6) + " " + unit : "0";
      axis.append(line, text);
    }
  }

  const part = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return Math.min(1, Math.max(0, (point.x - left) / width)) * (to - from) + from;
  };
  const around = (middle, factor) => show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  let begin = null, box = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    begin = part(event);
    box = document.createElementNS(space, "rect");
    box.setAttribute("class", "select"); box.setAttribute("y", top); box.setAttribute("height", bottom - top);
    svg.append(box);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (begin === null) return;
    const [a, b] = [begin, part(event)].sort((x, y) => x - y);
    box.setAttribute("x", left + (a - from) / (to - from) * width);
    box.setAttribute("width", (b - a) / (to - from) * width);
  });
  svg.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const [a, b] = [begin, part(event)].sort((x, y) => x - y);
    begin = null; box.remove();
    if (b - a > (to - from) * 0.005) show(a, b);
  });
  svg.addEventListener("pointercancel", () => { begin = null; if (box) box.remove(); });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    around(part(event), event.deltaY > 0 ? 1.25 : 0.8);
  }, { passive: false });
  svg.addEventListener("dblclick", () => show(0, 1));
  const moves = {
    in: () => around((from + to) / 2, 0.5), out: () => around((from + to) / 2, 2), all: () => show(0, 1),
    left: () => show(from - (to - from) / 3, to - (to - from) / 3),
    right: () => show(from + (to - from) / 3, to + (to - from) / 3),
  };
  document.querySelectorAll("[data-zoom]").forEach((button) =>
    button.addEventListener("click", () => moves[button.dataset.zoom]()));
}
