// What the theme leaves out for those who use a keyboard or a screen reader.
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0
})
