// The list of conversations, newest first.

import { byId, el, iconButton } from "./dom.js";

const DAY = 24 * 3600 * 1000; // ms

/** actions: open(id), rename(id, title), remove(id). running: ids of those an answer is coming in. */
export function showConversations(conversations, currentId, running, actions) {
  const groups = new Map();
  for (const conversation of [...conversations].sort((a, b) => b.updated - a.updated)) {
    const name = groupName(conversation.updated);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(rowOf(conversation, currentId, running, actions));
  }
  const nodes = [...groups].flatMap(([name, rows]) => [el("h2", { textContent: name }), el("ul", {}, ...rows)]);
  byId("conversations").replaceChildren(...nodes);
}

function groupName(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  return time >= midnight - 7 * DAY ? "Last seven days" : "Earlier";
}

function rowOf(conversation, currentId, running, actions) {
  const { id, title } = conversation;
  const isCurrent = id === currentId;
  const button = el("button", { class: "conversation", type: "button", title, on: { click: () => actions.open(id) } },
    running.has(id) ? el("span", { class: "dot pulse", role: "img", aria: { label: "answering" } }) : null, title);
  if (isCurrent) button.setAttribute("aria-current", "page");
  const row = el("li", { class: isCurrent ? "current" : "" }, button,
    el("div", { class: "row-actions" },
      iconButton("edit", `Rename ${title}`, () => rename(row, conversation, actions)),
      iconButton("delete", `Delete ${title}`, () => actions.remove(id))));
  return row;
}

function rename(row, { id, title }, actions) {
  const field = el("input", { class: "rename", value: title, maxLength: 120, aria: { label: "Title" } });
  let done = false;
  const finish = (text) => {
    if (done) return;
    done = true;
    actions.rename(id, text.trim() || title);
  };
  field.addEventListener("blur", () => finish(field.value));
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") finish(field.value);
    if (event.key === "Escape") finish(title);
  });
  row.replaceChildren(field);
  field.select();
}
