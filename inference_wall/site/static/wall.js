/*
 * What:  draws the figures of a page when the reader comes near, keeps them in step with the theme and the width, and
 *        turns figures and tables into CSV files. One script for the whole book.
 * Why:   plotly is 1.5 MB. It loads once, from this site, and only on a page where a figure comes into view.
 * Use:   `inference_wall.site` adds it to every page. A figure is what mime.py writes: figure.wall-figure with a .wall-plot
 *        and its JSON in a script element. Works from a server and from file://.
 * Not:   the look (wall.css; the colours of a figure are its variables), and figures that need a kernel.
 */
(function () {
  "use strict";

  const bundle = new URL("plotly/plotly-cartesian.min.js", document.currentScript.src).href;
  const root = document.documentElement;
  const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(hover: none), (pointer: coarse)");
  const NARROW = 560; // px, a phone
  const NEAR = 400; // px below the screen
  let loading = null;
  let queue = Promise.resolve();
  let printing = false;

  /* ---- plotly, once ---- */

  function loadPlotly() {
    if (!loading) {
      loading = new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = bundle;
        script.onload = () => resolve(window.Plotly);
        script.onerror = () => reject(new Error("the chart library did not load"));
        document.head.append(script);
      });
    }
    return loading;
  }

  /* ---- looks ---- */

  function template() {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue("--wall-" + name).trim();
    const text = colour("text"), grid = colour("grid"), line = colour("axis"), paper = colour("paper");
    const axis = {
      color: text, gridcolor: grid, linecolor: line, zerolinecolor: line, tickcolor: line,
      automargin: true, showline: true, ticks: "outside", ticklen: 4, zeroline: false, title: { standoff: 8 },
    };
    return {
      layout: {
        font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 13, color: text },
        colorway: [1, 2, 3, 4, 5, 6, 7, 8].map((number) => colour("series-" + number)),
        paper_bgcolor: paper, plot_bgcolor: paper,
        margin: { l: 56, r: 16, t: 24, b: 48 },
        hoverlabel: {
          bgcolor: colour("hover"), bordercolor: line, align: "left", namelength: -1,
          font: { color: text, size: 13 },
        },
        hovermode: "closest",
        legend: {
          orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom",
          bgcolor: "rgba(0,0,0,0)", font: { color: text },
        },
        modebar: { bgcolor: paper, color: colour("muted"), activecolor: text, orientation: "h" },
        xaxis: axis, yaxis: axis,
        annotationdefaults: { font: { color: text }, arrowcolor: line },
        shapedefaults: { line: { color: line } },
        coloraxis: { colorbar: { outlinewidth: 0, tickcolor: line } },
      },
      data: { bar: [{ marker: { line: { width: 0 } } }] },
    };
  }

  function clone(value) {
    return JSON.parse(JSON.stringify(value));
  }

  /* Break a long text for a hover label, which plotly does not wrap. */
  function wrapped(value) {
    if (typeof value !== "string") return value;
    return value.replace(/(.{20,34}?)\s+/g, "$1<br>");
  }

  /* A figure as it should be drawn at this width: on a phone the legend goes below, the hover says the series' name inside
     its box and breaks its lines, and a finger scrolls the page instead of zooming. */
  function fitted(figure, width) {
    const { data, layout } = clone(figure);
    layout.template = template();
    layout.autosize = true;
    layout.uirevision = "keep"; // a change of theme must not undo the reader's zoom
    if (touch.matches || width < NARROW) layout.dragmode = false;
    if (width < NARROW) {
      layout.font = { ...layout.font, size: 11 };
      layout.margin = { ...layout.margin, l: 44, r: 8 };
      layout.hoverlabel = { ...layout.hoverlabel, font: { ...(layout.hoverlabel || {}).font, size: 11 } };
      layout.legend = {
        ...layout.legend,
        orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom",
      };
      for (const trace of data) {
        if (trace.customdata) trace.customdata = trace.customdata.map((row) => (Array.isArray(row) ? row.map(wrapped) : wrapped(row)));
        if (trace.hovertemplate && typeof trace.hovertemplate === "string" && !trace.hovertemplate.includes("<extra>")) {
          trace.hovertemplate = (trace.name ? "<b>%{fullData.name}</b><br>" : "") + trace.hovertemplate + "<extra></extra>";
        }
      }
    }
    return { data, layout };
  }

  const config = {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false,
    plotlyServerURL: "",
    showTips: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  /* ---- drawing ---- */

  function read(element) {
    if (!element.wallFigure) {
      element.wallFigure = JSON.parse(element.querySelector('script[type="application/json"]').textContent);
    }
    return element.wallFigure;
  }

  function plotOf(element) {
    return element.querySelector(".wall-plot");
  }

  function drawNow(element) {
    const plot = plotOf(element);
    const figure = read(element);
    const width = plot.clientWidth;
    const { data, layout } = fitted(figure, width);
    element.wallNarrow = width < NARROW;
    return window.Plotly.react(plot, {
      data, layout, frames: figure.frames,
      config: { ...config, displayModeBar: touch.matches ? false : "hover" },
    });
  }

  /* One after another, with a breath between: the first is on the screen before the second costs anything. */
  function draw(element) {
    if (element.dataset.state) return;
    element.dataset.state = "waiting";
    queue = queue.then(() => drawOne(element)).then(() => new Promise((resolve) => setTimeout(resolve)));
  }

  async function drawOne(element) {
    if (element.dataset.state === "drawn") return; // printing came first
    try {
      await loadPlotly();
      await drawNow(element);
      finish(element);
    } catch (error) {
      element.dataset.state = "failed";
      plotOf(element).textContent = "This chart could not be drawn: " + error.message;
      console.error(error);
    }
  }

  function finish(element) {
    element.dataset.state = "drawn";
    // The letters inside the drawing would be read one tick at a time; the title, the words and the buttons remain.
    for (const svg of element.querySelectorAll(".main-svg")) svg.setAttribute("aria-hidden", "true");
    if (!performance.getEntriesByName("wall-first-figure").length) performance.mark("wall-first-figure");
  }

  function drawn() {
    return [...document.querySelectorAll('.wall-figure[data-state="drawn"]')];
  }

  /* Only the colours: what the reader zoomed, switched or pressed stays. */
  function recolour() {
    const colours = template();
    return Promise.all(drawn().map((element) => window.Plotly.relayout(plotOf(element), { template: colours })));
  }

  /* ---- data as CSV ---- */

  function field(value) {
    if (value === null || value === undefined) return "";
    const text = String(value);
    return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
  }

  function csv(rows) {
    return rows.map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
  }

  function words(title) {
    const text = typeof title === "string" ? title : (title || {}).text;
    return (text || "").replace(/<br\s*\/?>/g, " ").replace(/<\/?(b|i|u|s|em|sub|sup|span|a)\b[^>]*>/gi, "")
      .replace(/\s+/g, " ").trim();
  }

  /* One row a point, in the order of the traces: the series, its coordinates, and whatever else is given point by point.
     Where a figure has several axes of a kind, a column names the axis of the point. */
  function figureRows(figure) {
    const layout = figure.layout || {};
    const titles = (letter) => [...new Set(
      Object.keys(layout).filter((key) => key.startsWith(letter + "axis")).map((key) => words(layout[key].title)).filter(Boolean),
    )];
    const several = ["x", "y"].filter((letter) => titles(letter).length > 1);
    const columns = ["series", ...["x", "y"].map((letter) => (titles(letter).length === 1 ? titles(letter)[0] : letter))];
    const extra = [];
    const place = (name) => {
      if (!extra.includes(name)) extra.push(name);
      return columns.length + extra.indexOf(name);
    };
    const rows = [];
    figure.data.forEach((trace, number) => {
      const name = words(trace.name) || "series " + (number + 1);
      if (Array.isArray(trace.z) && Array.isArray(trace.z[0])) {
        trace.z.forEach((line, j) => line.forEach((value, i) => {
          const row = [name, (trace.x || [])[i] ?? i, (trace.y || [])[j] ?? j];
          row[place("value")] = value;
          rows.push(row);
        }));
        return;
      }
      const length = Math.max(...["x", "y", "values"].map((key) => (Array.isArray(trace[key]) ? trace[key].length : 0)));
      for (let i = 0; i < length; i++) {
        const row = [name, (trace.x || trace.labels || [])[i] ?? i, (trace.y || trace.values || [])[i]];
        for (const letter of several) {
          const axis = layout[(trace[letter + "axis"] || letter).replace(letter, letter + "axis")] || {};
          row[place(letter + " axis")] = words(axis.title);
        }
        if (Array.isArray(trace.base)) row[place("base")] = trace.base[i];
        if (Array.isArray(trace.text)) row[place("text")] = words(trace.text[i]);
        for (const axis of ["x", "y"]) {
          const error = trace["error_" + axis] || {};
          if (Array.isArray(error.array)) row[place(axis + " plus")] = error.array[i];
          if (Array.isArray(error.arrayminus)) row[place(axis + " minus")] = error.arrayminus[i];
        }
        const custom = (trace.customdata || [])[i];
        if (custom !== undefined) {
          [].concat(custom).forEach((value, k) => { row[place((figure.columns || [])[k] || "detail " + (k + 1))] = value; });
        }
        rows.push(row);
      }
    });
    const header = columns.concat(extra);
    return [header].concat(rows.map((row) => header.map((_, i) => row[i])));
  }

  function tableRows(table) {
    return [...table.rows].map((row) => [...row.cells].flatMap((cell) => {
      const value = cell.dataset.value ?? (cell.classList.contains("wall-null") ? "" : cell.textContent.trim());
      return [value].concat(Array(cell.colSpan - 1).fill(""));
    }));
  }

  function download(name, text) {
    const link = document.createElement("a");
    // The mark lets a spreadsheet see that this is UTF-8.
    link.href = URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv;charset=utf-8" }));
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function armButtons() {
    for (const button of document.querySelectorAll(".wall-csv")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const figure = button.closest(".wall-figure");
        const rows = figure
          ? figureRows(read(figure))
          : tableRows(button.closest(".wall-below").previousElementSibling.querySelector("table"));
        download(button.dataset.csv, csv(rows));
      });
    }
  }

  /* ---- the page ---- */

  function start() {
    armButtons();
    const figures = [...document.querySelectorAll(".wall-figure")];
    if (!figures.length) return;

    // The first answer of the observer waits for the whole page; a figure on the first screen need not.
    if (figures[0].getBoundingClientRect().top < window.innerHeight + NEAR) loadPlotly().catch(() => {});
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        near.unobserve(entry.target);
        draw(entry.target);
      }
    }, { rootMargin: NEAR + "px 0px" });
    figures.forEach((element) => near.observe(element));

    new MutationObserver(recolour).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
    darkSystem.addEventListener("change", recolour);

    // Plotly follows the width by itself; only the change between a phone's and a desk's arrangement needs another drawing.
    new ResizeObserver(() => {
      if (printing) return;
      for (const element of drawn()) {
        if (element.wallNarrow !== plotOf(element).clientWidth < NARROW) drawNow(element);
      }
    }).observe(document.body);

    // A printed page needs every figure, in light colours. The library must be there by then, so it loads when idle.
    const idle = window.requestIdleCallback || ((work) => setTimeout(work, 2000));
    window.addEventListener("load", () => idle(() => loadPlotly().catch(() => {})));
    window.addEventListener("beforeprint", () => {
      if (!window.Plotly) return;
      printing = true;
      root.classList.add("wall-printing");
      recolour();
      for (const element of figures.filter((each) => each.dataset.state !== "drawn")) {
        drawNow(element);
        finish(element);
      }
    });
    window.addEventListener("afterprint", () => {
      printing = false;
      root.classList.remove("wall-printing");
      recolour();
    });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
