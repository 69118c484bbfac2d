/* Light or dark, before the page is drawn: as chosen, or as the system has it. */
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("vitrail-theme");
  } catch { /* storage may be disabled */ }
  const apply = () => { root.dataset.theme = chosen ?? (system.matches ? "dark" : "light"); };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.querySelector(".theme").addEventListener("click", () => {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("vitrail-theme", chosen);
      } catch { /* as above */ }
      apply();
    });
  });
})();
