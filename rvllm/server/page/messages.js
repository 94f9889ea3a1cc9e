// One conversation on the screen: its messages, and what can be done with them.

import { byId, copyButton, el, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const ENDINGS = {
  length: "Stopped at the token limit",
  stopped: "Stopped",
  abort: "Ended by the server",
  timeout: "Ended by the server's time limit",
  interrupted: "Interrupted",
};

/**
 * actions: regenerate(index), goOn(index), edit(index, text), leaveOut(), retry(index), enterKey().
 * A view follows one message while it grows: update() is cheap enough for every frame.
 */
export class MessageView {
  constructor(message, index, actions) {
    this.message = message;
    this.index = index;
    this.actions = actions;
    this.node = el("li", { class: `message ${message.role}` });
    if (message.role === "user") this.showUser();
    else this.buildAssistant();
  }

  // The user's

  showUser() {
    const { content } = this.message;
    const actions = el("div", { class: "actions" },
      iconButton("edit", "Edit the message", () => this.showEditor()),
      copyButton(() => content, "Copy the message"));
    this.node.replaceChildren(hiddenHeading("You"), el("div", { class: "text", dir: "auto", textContent: content }), actions);
  }

  showEditor() {
    const area = el("textarea", { value: this.message.content, dir: "auto", rows: 3, aria: { label: "Edit the message" } });
    const send = () => {
      const text = area.value.trim();
      if (text) this.actions.edit(this.index, text);
    };
    const cancel = () => {
      this.showUser();
      this.node.querySelector("button").focus();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const buttons = el("div", {},
      el("button", { class: "button", type: "button", textContent: "Cancel", on: { click: cancel } }),
      el("button", { class: "button primary", type: "button", textContent: "Send", on: { click: send } }));
    this.node.replaceChildren(hiddenHeading("You"), el("div", { class: "editor" }, area, buttons));
    area.style.height = `${Math.min(area.scrollHeight + 4, innerHeight / 2)}px`;
    area.focus();
  }

  // The model's

  buildAssistant() {
    this.markdown = new MarkdownView();
    this.reasoningText = el("div", { dir: "auto" });
    this.reasoningTitle = el("summary");
    this.reasoning = el("details", { class: "reasoning", hidden: true }, this.reasoningTitle, this.reasoningText);
    this.dots = el("div", { class: "thinking-dots", hidden: true }, el("span"), el("span"), el("span"));
    this.problem = el("div", { class: "problem", role: "alert", hidden: true });
    this.meta = el("div", { class: "meta" });
    this.figures = el("span", { class: "figures" });
    this.node.append(hiddenHeading("Model"), this.reasoning, this.markdown.node, this.dots, this.problem, this.meta);
    this.update(false);
  }

  /** running: the answer is still coming. */
  update(running) {
    const { content, reasoning, error, stats } = this.message;
    this.node.setAttribute("aria-busy", String(running));
    this.reasoning.hidden = !reasoning;
    this.reasoningText.textContent = reasoning ?? "";
    this.reasoningTitle.textContent = running && !content ? "Thinking…" : "Thoughts";
    this.markdown.update(content);
    this.dots.hidden = !running || content !== "" || Boolean(reasoning);
    this.figures.replaceChildren(...figures(stats).map((text) => el("span", { textContent: text })));
    if (running !== this.running) this.showEnd(running);
    this.running = running;
    this.problem.hidden = !error || running;
  }

  showEnd(running) {
    const { content, error, finish } = this.message;
    this.meta.replaceChildren();
    if (!running) {
      if (error) this.showProblem(error);
      const buttons = el("div", { class: "actions" });
      if (content) buttons.append(copyButton(() => this.message.content, "Copy the answer"));
      if (content || !error) buttons.append(iconButton("again", "Answer again", () => this.actions.regenerate(this.index)));
      if (content && finish !== "stop") buttons.append(iconButton("more", "Continue the answer", () => this.actions.goOn(this.index)));
      if (buttons.children.length) this.meta.append(buttons);
      if (!error && ENDINGS[finish]) this.meta.append(el("span", { class: "note", textContent: ENDINGS[finish] }));
    }
    this.meta.append(this.figures);
    this.meta.hidden = !running && Boolean(error) && !content;
  }

  showProblem(error) {
    const button = (text, onClick) => el("button", { class: "button", type: "button", textContent: text, on: { click: onClick } });
    const buttons = el("div");
    if (error.isTooLong) buttons.append(button("Leave out the oldest messages", () => this.actions.leaveOut()));
    else if (error.status === 401) buttons.append(button("Enter the key", () => this.actions.enterKey(this.index)));
    else buttons.append(button("Try again", () => this.actions.retry(this.index)));
    this.problem.replaceChildren(el("b", { textContent: error.title }), el("p", { textContent: error.detail }), buttons);
  }
}

/** Shows all of a conversation; returns the view of its last message, or null. */
export function showMessages(conversation, actions) {
  const list = byId("messages");
  const views = conversation.messages.map((message, i) => new MessageView(message, i, actions));
  list.replaceChildren(...views.map((view) => view.node));
  if (conversation.firstSent > 0) {
    views.slice(0, conversation.firstSent).forEach((view) => view.node.classList.add("left-out"));
    views[conversation.firstSent]?.node.before(
      el("li", { class: "cut", textContent: "The messages above are no longer sent" }));
  }
  const isEmpty = views.length === 0;
  list.hidden = isEmpty;
  byId("empty").hidden = !isEmpty;
  return views.at(-1) ?? null;
}

/** The suggestions of an empty conversation; onPick(text). */
export function showSuggestions(suggestions, onPick) {
  byId("suggestions").replaceChildren(...suggestions.map(([title, rest]) =>
    el("li", {}, el("button", { type: "button", on: { click: () => onPick(`${title} ${rest}`) } },
      el("b", { textContent: title }), el("span", { textContent: rest })))));
}

function hiddenHeading(text) {
  return el("h2", { class: "visually-hidden", textContent: text });
}

function figures(stats) {
  if (!stats) return [];
  const { tokens, seconds, firstSeconds } = stats;
  const texts = [];
  if (tokens > 1 && seconds > 0.02) texts.push(`${((tokens - 1) / seconds).toFixed(1)} tok/s`);
  texts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  texts.push(`${firstSeconds.toFixed(2)} s to first token`);
  return texts;
}
