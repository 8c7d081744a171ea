/* A copy button copies its text and shows the result for a moment. Browsers have no clipboard on plain http of another host. */
document.addEventListener("click", async (event) => {
  const found = event.target.closest("[data-copy]");
  if (!found) return;
  event.preventDefault();
  const result = await copyText(found.dataset.copy, found) ? "Copied" : "Press Ctrl+C";
  const before = found.dataset.label || found.textContent;
  found.dataset.label = before;
  found.textContent = result;
  clearTimeout(found.waits);
  found.waits = setTimeout(() => { found.textContent = before; delete found.dataset.label; }, 1600);
});
async function copyText(text, near) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.cssText = "position:fixed;opacity:0";
    near.after(area);  // inside a dialog, which keeps the focus
    area.select();
    let done = false;
    try { done = document.execCommand("copy"); } catch { /* the text is selected: the reader copies it */ }
    area.remove();
    near.focus();
    return done;
  }
}
