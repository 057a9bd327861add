"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  const escapeHtml = (text) => String(text).replace(/[&<>"']/g, (c) => escapes[c]);

  // Tooltips: titles become our own, quicker ones; their text stays available to screen readers.
  const tip = document.getElementById("tip");
  const adopt = (root) => {
    for (const title of all("svg title", root)) {
      const owner = title.parentElement;
      owner.dataset.tip = title.textContent;
      owner.setAttribute("aria-label", title.textContent);
      title.remove();
    }
    for (const cell of all("td[title]", root)) {
      cell.dataset.tip = cell.title;
      cell.removeAttribute("title");
    }
  };
  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18) + "px";
  };
  const show = (text, x, y) => { tip.textContent = text; tip.hidden = false; place(x, y); };
  const hide = () => { tip.hidden = true; };
  document.addEventListener("pointermove", (event) => {
    const owner = event.target.closest && event.target.closest("[data-tip]");
    if (owner) show(owner.dataset.tip, event.clientX, event.clientY);
    else hide();
  });
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, true);
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  adopt(document);

  // Tabs: links without a script, tabs with one. Printing shows every model.
  const tabs = all("[data-tab]");
  const sections = all("section.model");
  if (tabs.length > 1) {
    const strip = tabs[0].parentElement;
    strip.setAttribute("role", "tablist");
    const select = (index, focus) => {
      tabs.forEach((tab, i) => {
        tab.setAttribute("aria-selected", i === index);
        tab.tabIndex = i === index ? 0 : -1;
        sections[i].hidden = i !== index;
      });
      if (focus) tabs[index].focus({ preventScroll: true });
      strip.scrollLeft = tabs[index].offsetLeft - strip.offsetLeft - strip.clientWidth / 2 + tabs[index].offsetWidth / 2;
      relabel(sections[index]);
    };
    tabs.forEach((tab, index) => {
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-controls", "model-" + index);
      sections[index].setAttribute("role", "tabpanel");
      tab.addEventListener("click", (event) => {
        event.preventDefault();
        history.replaceState(null, "", "#model-" + index);
        select(index, true);
      });
      tab.addEventListener("keydown", (event) => {
        const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (next === undefined) return;
        event.preventDefault();
        select((next + tabs.length) % tabs.length, true);
      });
    });
    const wanted = /^#model-(\d+)$/.exec(location.hash);
    queueMicrotask(() => select(wanted && sections[+wanted[1]] ? +wanted[1] : 0, false));
    addEventListener("hashchange", () => {
      const at = /^#model-(\d+)$/.exec(location.hash);
      if (at && sections[+at[1]]) select(+at[1], false);
    });
  }

  // Timelines.
  const time = (ms) => {
    if (ms === 0) return "0 ms";
    const [factor, unit] = ms < 9.995e-4 ? [1e-6, "ns"] : ms < 0.9995 ? [1e-3, "µs"] : ms < 999.5 ? [1, "ms"] : [1e3, "s"];
    return +(ms / factor).toPrecision(6) + " " + unit;
  };
  const svgElement = (name, attributes, text) => {
    const element = document.createElementNS(document.querySelector("svg").namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const layOut = (lanes) => {
    const svg = lanes.querySelector(".lane-svg");
    const width = svg.getBoundingClientRect().width;
    if (width === 0) return;
    const end = +lanes.dataset.end;
    const raw = end / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
    const ticks = svg.querySelector(".ticks");
    ticks.replaceChildren();
    const height = svg.getAttribute("height");
    for (let index = 0; index * step <= end * 1.000001; index++) {
      const x = (index * step) / end * 100;
      const anchor = index === 0 ? "start" : x > 100 - 3000 / width ? "end" : "middle";
      ticks.append(svgElement("line", { x1: x + "%", x2: x + "%", y1: 18, y2: height }));
      ticks.append(svgElement("text", { x: x + "%", y: 12, "text-anchor": anchor }, time(index * step)));
    }
    for (const label of all(".span-label", lanes)) {
      label.setAttribute("visibility", +label.dataset.width / 100 * width < 36 ? "hidden" : "visible");
    }
  };
  const relabel = (root) => all(".lanes", root).forEach(layOut);
  for (const lanes of all(".lanes")) {
    const box = lanes.querySelector(".lane-scroll");
    const svg = lanes.querySelector(".lane-svg");
    let zoom = 1;
    let current = -1;
    const spans = all(".span", lanes);
    const setZoom = (next, anchorX) => {
      next = Math.max(1, Math.min(512, next));
      const at = (box.scrollLeft + anchorX) / zoom;
      zoom = next;
      svg.style.width = zoom * 100 + "%";
      box.scrollLeft = at * zoom - anchorX;
      layOut(lanes);
    };
    const middle = () => box.clientWidth / 2;
    lanes.addEventListener("click", (event) => {
      const action = event.target.dataset && event.target.dataset.zoom;
      if (action) setZoom(action === "in" ? zoom * 2 : action === "out" ? zoom / 2 : 1, middle());
    });
    box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      setZoom(zoom * Math.exp(-event.deltaY / 240), event.clientX - box.getBoundingClientRect().left);
    }, { passive: false });
    const walk = (index) => {
      if (spans[current]) spans[current].classList.remove("on");
      current = Math.max(0, Math.min(spans.length - 1, index));
      const span = spans[current];
      if (!span) return;
      span.classList.add("on");
      let bar = span.querySelector("rect").getBoundingClientRect();
      const view = box.getBoundingClientRect();
      if (bar.left < view.left || bar.right > view.right) box.scrollLeft += bar.left - view.left - 40;
      bar = span.querySelector("rect").getBoundingClientRect();
      requestAnimationFrame(() => requestAnimationFrame(() => show(span.dataset.tip, Math.max(bar.left, view.left), bar.bottom - 10)));
    };
    box.addEventListener("keydown", (event) => {
      const actions = {
        ArrowRight: () => walk(current + 1), ArrowLeft: () => walk(current - 1), Home: () => walk(0), End: () => walk(spans.length - 1),
        "+": () => setZoom(zoom * 2, middle()), "=": () => setZoom(zoom * 2, middle()), "-": () => setZoom(zoom / 2, middle()), 0: () => setZoom(1, 0),
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
    box.addEventListener("blur", () => { if (spans[current]) spans[current].classList.remove("on"); hide(); });
    if (window.ResizeObserver) new ResizeObserver(() => layOut(lanes)).observe(box);
    layOut(lanes);
  }

  // Heat tables.
  const digits = (value) => value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0) + "×";
  const level = (ratio) => Math.min(8, Math.ceil(Math.log(Math.max(1, ratio)) / Math.log(16) * 8));
  const hatch = { simulated: " hatch-simulated", emulated: " hatch-emulated" };
  for (const heat of all(".heat")) {
    const data = JSON.parse(document.getElementById(heat.dataset.source).textContent);
    const part = (name) => heat.querySelector(`[data-heat=${name}]`);
    const body = heat.querySelector("tbody");
    const limit = 200;
    let unfolded = false;
    const rows = data.rows.map(([id, name, kind, cells, placed]) => {
      const times = cells.filter(Array.isArray).map((cell) => cell[0]);
      const best = Math.min(...times);
      const contrast = times.length > 1 && best > 0 ? Math.max(...times) / best : null;
      return { id, name, kind: data.kinds[kind], cells, placed, best, contrast };
    });
    const cellHtml = (row, cell, unit) => {
      const placed = row.placed === unit ? "● " : "";
      if (!Array.isArray(cell)) {
        const reason = cell < 0 ? data.reasons[-cell - 1] : "not tried";
        return `<td class="num fails" title="${escapeHtml(reason)}">${placed}${cell < 0 ? "fails" : "–"}</td>`;
      }
      const [ms, text, spread, count, originIndex, noisy] = cell;
      const origin = data.origins[originIndex];
      const ratio = row.best > 0 ? ms / row.best : 1;
      const title = `${row.name} on ${data.units[unit]}\n${text}, ${origin}, ${digits(ratio)} the best\nspread ${spread.toFixed(1)}%, ${count} sample${count === 1 ? "" : "s"}`;
      const label = data.shared[unit] ? "" : " " + origin;
      return `<td class="num h${level(ratio)}${hatch[origin] || ""}" title="${escapeHtml(title)}">${placed}${noisy ? "~" : ""}${text}${label}${ratio > 1 ? `<small>${digits(ratio)}</small>` : ""}</td>`;
    };
    const rowHtml = (row) => `<tr><td class="num">${row.id}</td><td class="name" title="${escapeHtml(row.name)}">${escapeHtml(row.name)}</td>` +
      `<td class="kind" title="${escapeHtml(row.kind)}">${escapeHtml(row.kind)}</td>${row.cells.map((cell, unit) => cellHtml(row, cell, unit)).join("")}` +
      `<td class="num">${row.contrast === null ? "–" : digits(row.contrast)}</td></tr>`;
    const keys = {
      position: (row) => row.id,
      time: (row) => -row.best,
      ratio: (row) => -(row.contrast === null ? 0 : row.contrast),
    };
    const render = () => {
      const wanted = part("filter").value.trim().toLowerCase();
      const sort = part("sort").value;
      const unit = sort.startsWith("unit") ? +sort.slice(4) : 0;
      const key = keys[sort] || ((row) => (Array.isArray(row.cells[unit]) ? -row.cells[unit][0] : -Infinity));
      const found = rows.filter((row) => !wanted || row.name.toLowerCase().includes(wanted) || row.kind.toLowerCase().includes(wanted));
      // Without "show all", the slowest operators stay: they are what matters, in whatever order.
      let shown = found;
      if (!unfolded && found.length > limit) {
        const ranked = sort === "position" ? found.slice().sort((a, b) => b.best - a.best || a.id - b.id) : found.slice().sort((a, b) => key(a) - key(b) || a.id - b.id);
        shown = ranked.slice(0, limit);
      }
      shown = shown.slice().sort((a, b) => key(a) - key(b) || a.id - b.id);
      body.innerHTML = shown.map(rowHtml).join("");
      adopt(body);
      const matching = found.length === rows.length ? "" : ` matching, ${rows.length} in all`;
      part("count").textContent = (shown.length === found.length ? "" : `${shown.length} of `) + `${found.length} operator${found.length === 1 ? "" : "s"}${matching}`;
      const button = part("all");
      button.hidden = found.length <= limit;
      button.textContent = unfolded ? `top ${limit} only` : `show all ${found.length}`;
    };
    part("filter").addEventListener("input", render);
    part("sort").addEventListener("change", render);
    part("all").addEventListener("click", () => { unfolded = !unfolded; render(); });
    render();
  }
})();
