/* What the pages do by themselves: change what has changed and leave the rest alone, the theme, and keys. */
window.purveyor = {
  // Bring an element to new content in place: focus, scrolling and motion stay where nothing changed.
  patch(id, html) {
    const now = document.getElementById(id);
    if (!now) return;
    const wanted = document.createElement("template");
    wanted.innerHTML = html;
    this.sync(now, wanted.content);
  },
  sync(now, wanted) {
    const want = [...wanted.childNodes];
    this.order(now, want);
    const have = [...now.childNodes];
    for (let at = 0; at < Math.max(have.length, want.length); at++) {
      const a = have[at], b = want[at];
      if (!b) a.remove();
      else if (!a) now.appendChild(b);
      else if (a.nodeType !== b.nodeType || a.nodeName !== b.nodeName) a.replaceWith(b);
      else if (a.nodeType === Node.TEXT_NODE) { if (a.data !== b.data) a.data = b.data; }
      else {
        const own = a.nodeName === "DETAILS" ? "open" : "";  // the reader opens and closes it
        for (const { name } of [...a.attributes]) if (name !== own && !b.hasAttribute(name)) a.removeAttribute(name);
        for (const { name, value } of b.attributes) if (name !== own && a.getAttribute(name) !== value) a.setAttribute(name, value);
        if (a.type === "checkbox") a.checked = b.hasAttribute("checked");
        this.sync(a, b);
      }
    }
  },
  // Bring children with an id of their own to their new places, so that each is compared with itself.
  order(now, want) {
    const known = new Map([...now.children].filter(e => e.dataset.id).map(e => [e.dataset.id, e]));
    if (!known.size) return;
    want.forEach((wanted, at) => {
      const id = wanted.dataset?.id, place = now.childNodes[at] || null;
      if (!id || place?.dataset?.id === id) return;
      now.insertBefore(known.get(id) || wanted.cloneNode(true), place);
    });
  },
  theme() { return document.documentElement.dataset.theme; },
  wear(theme) {
    document.documentElement.dataset.theme = theme;
    document.body?.classList.toggle("body--dark", theme === "dark");
    document.body?.classList.toggle("body--light", theme !== "dark");
    window.Quasar?.Dark?.set(theme === "dark");
  },
  turn() {
    const next = this.theme() === "dark" ? "light" : "dark";
    localStorage.setItem("purveyor-theme", next);
    this.wear(next);
  },
};
purveyor.wear(localStorage.getItem("purveyor-theme") ||
  (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.addEventListener("DOMContentLoaded", () => purveyor.wear(purveyor.theme()));
// g and a letter goes to a page, / to the filter, t turns the theme.
(() => {
  const pages = { o: "/", q: "/console/queues", s: "/console/subscriptions", d: "/console/dead-letters", p: "/console/pipeline" };
  let going = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, [contenteditable]")) return;
    if (document.querySelector(".q-dialog")) return;
    if (event.key === "g") { going = Date.now(); return; }
    if (Date.now() - going < 1500 && pages[event.key]) location.href = pages[event.key];
    else if (event.key === "/") { event.preventDefault(); document.querySelector("input[type=search], .filter input")?.focus(); }
    else if (event.key === "t") purveyor.turn();
    going = 0;
  });
})();
// A word in a table that does something tells the page which one it is.
document.addEventListener("click", (event) => {
  const found = event.target.closest("[data-act]");
  if (found) emitEvent("act", { act: found.dataset.act, key: found.dataset.key });
});
