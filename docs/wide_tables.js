// The theme puts each table into a box that scrolls. Where the table is wider than its box, the box
// takes the focus, so that the arrow keys scroll it.
addEventListener("load", () => {
  const mark = ({ target: box }) => {
    if (box.scrollWidth <= box.clientWidth) {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    } else {
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", "Wide table");
    }
  };
  const watcher = new ResizeObserver((entries) => entries.forEach(mark));
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => watcher.observe(box));
});
