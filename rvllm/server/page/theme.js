// A classic script in the head: the theme is known before anything is drawn.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("rvllm.theme");
  } catch {
    // Storage may be forbidden; the system's theme then holds.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
