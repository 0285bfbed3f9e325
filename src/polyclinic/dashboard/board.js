"use strict";
const EVERY = 2000;
const shown = new Map();
const at = (id) => document.getElementById(id);

/* What a reader has done to a part must outlast its replacement: opened, scrolled, focused. */
const named = (stop) => stop.getAttribute("aria-label") ?? stop.closest("figure")?.querySelector("strong")?.textContent;
const stops = (part) => [...part.querySelectorAll("summary, .scroll")];

function replace(part, html) {
  const kept = new Map();
  for (const stop of stops(part)) {
    const open = stop.parentElement.open === true;
    kept.set(stop.tagName + named(stop), { open, left: stop.scrollLeft, focus: stop === document.activeElement });
  }
  part.innerHTML = html;
  for (const stop of stops(part)) {
    const before = kept.get(stop.tagName + named(stop));
    if (!before) continue;
    if (before.open) stop.parentElement.open = true;
    stop.scrollLeft = before.left;
    if (before.focus) stop.focus({ preventScroll: true });
  }
}

function put(id, html) {
  const part = at(id), chosen = getSelection();
  if (shown.get(id) === html) return;
  if (!chosen.isCollapsed && part.contains(chosen.anchorNode)) return; // somebody is copying from it
  replace(part, html);
  part.hidden = html === "";
  shown.set(id, html);
}

function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function show(news) {
  for (const [id, html] of Object.entries(news.parts)) put(id, html);
  for (const [id, text] of Object.entries(news.words)) say(id, text);
  if (document.title !== news.tab) document.title = news.tab;
}

async function look() {
  try {
    const answer = await fetch("state.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    show(await answer.json());
    say("link", "");
  } catch (error) {
    const why = error instanceof TypeError ? "the board does not answer; is it still running?" : error.message;
    say("link", `This page is not up to date: ${why}`);
  }
  setTimeout(look, EVERY);
}

setTimeout(look, EVERY);
