// Boxes that scroll: the theme puts each table into one, and `extra.css` each picture. Where one is
// too narrow for what is in it, it takes the focus, so that the arrow keys scroll it.
addEventListener("load", () => {
  const mark = ({ target: box }) => {
    if (box.scrollWidth <= box.clientWidth) {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    } else {
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", "Wide content");
    }
  };
  const watcher = new ResizeObserver((entries) => entries.forEach(mark));
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset picture").forEach((box) => watcher.observe(box));
});
