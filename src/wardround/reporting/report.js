"use strict";
(() => {
  const told = document.getElementById("told");
  const tip = document.getElementById("tip");

  // Tables: a click on a heading sorts by it, a second click turns the order round.
  function sort(button) {
    const head = button.closest("th");
    const table = head.closest("table");
    const column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending" ||
      (head.getAttribute("aria-sort") === "none" && head.classList.contains("number"));
    for (const other of table.tHead.rows[0].cells) {
      if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    }
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, key: keyOf(row.cells[column]) }));
    rows.sort((a, b) => order(a.key, b.key, down));
    body.append(...rows.map((entry) => entry.row));
    told.textContent = `Sorted by ${button.textContent.trim()}, ${down ? "descending" : "ascending"}`;
  }
  function keyOf(cell) {
    if (!cell || cell.dataset.v === undefined) return cell ? cell.textContent.trim() : "";
    return cell.dataset.v === "" ? null : cell.dataset.v === "inf" ? Infinity : cell.dataset.v === "-inf" ? -Infinity : Number(cell.dataset.v);
  }
  function order(a, b, down) {
    if (a === null || b === null) return (a === null) - (b === null);
    const mixed = typeof a !== typeof b;
    const result = mixed ? (typeof a === "string") - (typeof b === "string")
      : typeof a === "string" ? a.localeCompare(b) : a === b ? 0 : a < b ? -1 : 1;
    return down && !mixed ? -result : result;
  }

  // Volumes: the slider moves both strips and shows the outlines of one slice.
  function move(slider) {
    const figure = slider.closest("figure");
    const index = Number(slider.value);
    for (const strip of figure.querySelectorAll(".strip-image")) {
      const number = strip.parentNode.querySelectorAll(":scope > .slice").length;
      strip.setAttribute("y", String(-index * Number(strip.getAttribute("height")) / number));
    }
    for (const panel of figure.querySelectorAll(".scan > svg")) {
      panel.querySelectorAll(":scope > .slice").forEach((slice, place) => slice.classList.toggle("off", place !== index));
    }
    const output = figure.querySelector("output");
    const text = `${output.dataset.what} ${slider.dataset.places.split(",")[index]} of ${output.dataset.depth}`;
    output.textContent = text;
    slider.setAttribute("aria-valuetext", text);
  }

  // Runs: one at a time, and the contents point into the one that is shown.
  function choose(value) {
    for (const run of document.querySelectorAll("article.run")) run.hidden = run.id !== value;
    for (const link of document.querySelectorAll("nav a[data-part]")) {
      const target = `${value}-${link.dataset.part}`;
      link.href = `#${target}`;
      link.parentNode.hidden = !document.getElementById(target);
    }
  }

  function outlines(box) {
    document.body.classList.toggle(`no-${box.dataset.outline}`, !box.checked);
    for (const other of document.querySelectorAll(`input[data-outline="${box.dataset.outline}"]`)) other.checked = box.checked;
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("th button");
    if (button) sort(button);
  });
  document.addEventListener("input", (event) => {
    if (event.target.matches(".slider input")) move(event.target);
    if (event.target.matches("input[data-outline]")) outlines(event.target);
    if (event.target.matches('input[name="run"]')) choose(event.target.value);
  });

  // Values under the pointer, at once rather than after the browser's own delay.
  function quicken(root) {
    for (const title of root.querySelectorAll(".band > title, .spot > title, .dot > title")) {
      title.parentNode.dataset.tip = title.textContent;
      title.remove();
    }
  }
  document.addEventListener("pointermove", (event) => {
    const mark = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.min(innerHeight - box.height - 4, event.clientY + 14)}px`;
  });

  function begin() {
    quicken(document);
    const chosen = document.querySelector('input[name="run"]:checked');
    choose(chosen ? chosen.value : "r0");
  }
  begin();
  const menu = document.querySelector("nav > details");
  if (menu && matchMedia("(max-width: 62rem)").matches) menu.open = false;

  // Live: ask our own server whether there is more, and put the new page in place of the old.
  async function follow(state) {
    let done = false;
    try {
      const answer = await (await fetch("status.json", { cache: "no-store" })).json();
      if (answer.state !== state) {
        const page = new DOMParser().parseFromString(await (await fetch("./", { cache: "no-store" })).text(), "text/html");
        swap(page);
        state = answer.state;
      }
      done = answer.done;
    } catch {
      told.textContent = "The server has stopped; this page is no longer updated.";
      done = true;
    }
    if (!done) setTimeout(() => follow(state), 2000);
  }
  function swap(page) {
    const chosen = document.querySelector('input[name="run"]:checked');
    const open = [...document.querySelectorAll("main details")].map((entry) => entry.open);
    for (const place of ["main", "header.top", "nav"]) {
      const fresh = page.querySelector(place);
      if (fresh) document.querySelector(place).replaceChildren(...fresh.childNodes);
    }
    document.title = page.title;
    document.querySelectorAll("main details").forEach((entry, place) => { if (open[place]) entry.open = true; });
    if (chosen) {
      const again = [...document.querySelectorAll('input[name="run"]')].find((entry) => entry.value === chosen.value);
      if (again) again.checked = true;
    }
    for (const kind of ["truth", "prediction"]) {
      if (document.body.classList.contains(`no-${kind}`)) {
        for (const box of document.querySelectorAll(`input[data-outline="${kind}"]`)) box.checked = false;
      }
    }
    begin();
    told.textContent = "The page was updated.";
  }
  if (document.body.hasAttribute("data-live")) follow(document.body.dataset.live);
})();
