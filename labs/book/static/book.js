// What the theme leaves out for people who use the keyboard or a screen reader (axe-core names the rules).
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Pages of the book");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "Parts of this page");
  for (const code of document.querySelectorAll("pre")) {
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0; // the arrow keys scroll it
  }
});
