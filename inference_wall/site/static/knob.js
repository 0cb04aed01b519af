/*
 * What:  brings dials to life: joins the options between the marks that inference_wall/widgets.py leaves on a page into one
 *        div.wall-dial with its control, and shows the option that the control points at.
 * Why:   a page has no kernel, so every option is already there. Without this script they stand one after another.
 * Use:   `inference_wall.site` adds it to every page, before wall.js. Marks, all in one cell's output: .wall-dial-start (holds
 *        the control, hidden), a .wall-dial-option before each option, .wall-dial-end.
 * Not:   drawing figures (wall.js) and computing anything.
 *
 * An option that is not chosen keeps its place and its size and is only out of sight: its figures are then drawn at the right
 * width before they are asked for, and the page does not jump when another option is chosen.
 */
(function () {
  "use strict";

  /* The child of `container` that holds `element`: an output is wrapped by the notebook's renderer, a figure is not. */
  function within(container, element) {
    while (element.parentElement !== container) element = element.parentElement;
    return element;
  }

  function build(start, number) {
    const cell = start.closest(".cell_output") || start.parentElement;
    const first = within(cell, start);
    const panels = [];
    let last = first.nextElementSibling;
    for (; last && !holds(last, "wall-dial-end"); last = last.nextElementSibling) {
      if (holds(last, "wall-dial-option")) panels.push([]);
      if (panels.length) panels[panels.length - 1].push(last);
    }
    const control = start.querySelector("select, input");
    if (!last || panels.length < 2 || !control) return; // not a whole dial: leave everything in sight

    const dial = document.createElement("div");
    dial.className = "wall-dial";
    dial.setAttribute("role", "group");
    dial.setAttribute("aria-label", start.querySelector("label > span").textContent);
    const stage = document.createElement("div");
    stage.className = "wall-dial-stage";
    first.before(dial);
    first.remove();
    last.remove();
    const boxes = panels.map((elements, at) => {
      const box = document.createElement("div");
      box.className = "wall-dial-panel";
      box.id = "wall-dial-" + number + "-" + at;
      const head = elements[0].querySelector(".wall-dial-option") || elements[0];
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", head.textContent.trim());
      box.append(...elements);
      stage.append(box);
      return box;
    });
    const names = boxes.map((box) => box.querySelector(".wall-dial-option strong").textContent);
    start.className = "wall-dial-control";
    start.hidden = false;
    const said = document.createElement("span");
    said.className = "wall-dial-value";
    said.setAttribute("aria-hidden", "true"); // for the eye: a slider tells its value to a screen reader itself, and a list shows it
    if (control.type === "range") start.querySelector("label").append(said);
    control.setAttribute("aria-controls", boxes.map((box) => box.id).join(" "));
    dial.append(start, stage);

    function turn() {
      const chosen = Number(control.value);
      boxes.forEach((box, at) => {
        box.classList.toggle("is-shown", at === chosen);
        box.inert = at !== chosen; // neither focus nor a screen reader goes there
      });
      said.textContent = names[chosen];
      if (control.type === "range") control.setAttribute("aria-valuetext", names[chosen]);
    }
    control.addEventListener("input", turn);
    control.addEventListener("change", turn);
    // A browser that comes back to a page keeps what the reader chose.
    window.addEventListener("pageshow", turn);
    turn();
  }

  function holds(element, name) {
    return element.classList.contains(name) || element.querySelector("." + name) !== null;
  }

  function start() {
    document.querySelectorAll(".wall-dial-start").forEach(build);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
