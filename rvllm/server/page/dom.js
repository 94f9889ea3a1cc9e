// Elements are built, never parsed: no text can become markup.

export const byId = (id) => document.getElementById(id);

/** An element. props: properties of it, except class, data, aria (objects of attributes) and on (listeners). */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "aria") for (const [key, text] of Object.entries(value)) node.setAttribute(`aria-${key}`, text);
    else if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onClick) {
  return el("button", { class: "icon-button", type: "button", title: label, aria: { label }, on: { click: onClick } }, icon(name));
}

/** A button that copies text() and says so for a moment. */
export function copyButton(text, label, withText = false) {
  const button = iconButton("copy", label, async () => {
    const copied = await copy(text());
    show(copied ? "check" : "close", copied ? "Copied" : "Cannot copy");
    announce(copied ? "Copied" : "The browser does not allow copying");
    setTimeout(() => show("copy", "Copy"), 1500);
  });
  const show = (name, word) => button.replaceChildren(icon(name), ...(withText ? [word] : []));
  show("copy", "Copy");
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that came by plain HTTP from another machine have no clipboard API.
    const area = el("textarea", { value: text, class: "visually-hidden" });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** Says text to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}

let toastTimer = 0;

export function toast(text, action = "", onAction = () => {}) {
  byId("toast-text").textContent = text;
  const button = byId("toast-action");
  button.textContent = action;
  button.hidden = !action;
  button.onclick = () => {
    byId("toast").hidden = true;
    onAction();
  };
  byId("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { byId("toast").hidden = true; }, 6000);
}

/** Makes a text area as high as its text, up to what the style sheet allows. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}
