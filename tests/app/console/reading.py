"""What a person could not read on a page, found in the page itself by the web's rules for contrast (WCAG 2, AA)."""

HARD_TO_READ = """() => {
  const light = colour => {
    const parts = colour.match(/[\\d.]+/g).map(Number);
    const linear = parts.slice(0, 3).map(v => v / 255);
    const [r, g, b] = linear.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return { of: 0.2126 * r + 0.7152 * g + 0.0722 * b, shows: parts.length < 4 || parts[3] > 0.9 };
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const found = light(getComputedStyle(at).backgroundColor);
      if (found.shows) return found.of;
    }
    return 1;
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const element = node.parentElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
    const seen = node.data.trim() && box.width && box.height && box.right > 0 && style.visibility === "visible";
    if (!seen || element.closest("svg, script, style, [aria-hidden=true], [disabled]")) continue;
    const pixels = parseFloat(style.fontSize), a = light(style.color).of, b = behind(element);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (pixels < 12 || ratio < (pixels >= 18.6 ? 3 : 4.5)) found.push([node.data.trim(), pixels, ratio.toFixed(2)]);
  }
  return found;
}"""
"""Texts that are too small, or hardly stand out from what is behind them: a ratio of 4.5, for large ones of 3."""

TABS_OUT_OF_SIGHT = """() => [...document.querySelectorAll("nav a")]
  .filter(link => {
    const box = link.getBoundingClientRect();
    const found = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    return box.left < 0 || box.right > window.innerWidth || !link.contains(found);
  })
  .map(link => link.textContent)"""
"""Links to pages that a person cannot see and touch without scrolling sideways."""

BROKEN_NAMES = """() => {
  const text = element => [element.textContent.slice(0, 20), element.closest("[aria-label]")?.ariaLabel];
  const lines = element => element.getBoundingClientRect().height / parseFloat(getComputedStyle(element).lineHeight);
  const wrapped = [...document.querySelectorAll("table.data .cut")].filter(element => lines(element) > 1.5);
  const outside = [...document.querySelectorAll("table.data .cut")].filter(element =>
    element.getBoundingClientRect().right > element.closest("td").getBoundingClientRect().right + 1);
  const boxes = [...document.querySelectorAll("svg.flow g > text.name, svg.flow g > text.sub")].filter(element =>
    element.getBBox().width > element.parentNode.querySelector("rect").getBBox().width);
  return [...wrapped, ...outside, ...boxes].map(text);
}"""
"""Names that wrap inside a word, or are wider than the cell or box that they stand in."""

UNTOLD = """() => [...document.querySelectorAll("table.data:not(.stays) td:not(:first-child):not(.wide)")]
  .filter(cell => !getComputedStyle(cell, "::before").content.includes(cell.dataset.title))
  .map(cell => cell.dataset.title)"""
"""On a phone a row is a card: values in it that do not say what they are."""
