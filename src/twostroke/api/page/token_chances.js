/** Tokens coloured by their probability, with the alternatives. */
import { el } from "./dom.js";

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // least probability of levels 0 to 3; level 4 is below all

/**
 * Return the tokens of a choice with their log-probabilities, for either API.
 * @param {object} choice of a chunk of a completion or of a chat
 * @returns {{token: string, logprob: ?number, top: {token: string, logprob: number}[]}[]}
 */
export function tokensOf({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top: top ?? [] }));
  }
  return (logprobs.tokens ?? []).map((token, i) => {
    const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob }));
    top.sort((a, b) => b.logprob - a.logprob);
    return { token, logprob: logprobs.token_logprobs[i], top };
  });
}

/** Splits text into elements of one token each, where the text is known to be of these tokens. */
export class TokenWriter {
  #pending = []; // tokens whose text has not arrived: it is held back while it may begin a stop string

  /**
   * Return the pieces of a text that arrived with these tokens.
   * @param {string} text
   * @param {ReturnType<tokensOf>} tokens
   * @returns {(Node|string)[]} pieces that add up to the text
   */
  pieces(text, tokens) {
    this.#pending.push(...tokens);
    if (text === "" || this.#pending.length === 0) return text === "" ? [] : [text];
    const pieces = [];
    let rest = text;
    while (this.#pending.length > 0) {
      const [next] = this.#pending;
      if (!rest.startsWith(next.token)) break;
      this.#pending.shift();
      rest = rest.slice(next.token.length);
      if (next.token !== "") pieces.push(piece(next.token, [next]));
    }
    // a character made of several tokens is one piece
    if (rest !== "") pieces.push(this.#pending.length > 0 ? piece(rest, this.#pending.splice(0)) : rest);
    return pieces;
  }
}

const known = new WeakMap();

function piece(text, tokens) {
  const least = Math.min(...tokens.map(({ logprob }) => logprob ?? 0));
  const level = LEVELS.findIndex((chance) => Math.exp(least) >= chance);
  const element = el("span", { className: `token chance-${level < 0 ? LEVELS.length : level}`, tabIndex: -1 }, text);
  known.set(element, tokens);
  return element;
}

/**
 * Shows a token's alternatives while a pointer or the focus is on it; arrow keys move between tokens.
 * @param {HTMLElement} answer element with the tokens
 * @param {HTMLElement} panel element for the alternatives
 */
export function showChancesOf(answer, panel) {
  const show = ({ target }) => known.has(target) && panel.replaceChildren(...described(known.get(target)));
  answer.addEventListener("pointerover", show);
  answer.addEventListener("focusin", show);
  answer.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const tokens = step ? [...answer.querySelectorAll(".token")] : [];
    if (tokens.length === 0) return;
    event.preventDefault();
    const at = tokens.indexOf(document.activeElement);
    tokens[at < 0 ? 0 : Math.max(0, Math.min(tokens.length - 1, at + step))].focus();
  });
}

function described(tokens) {
  return tokens.map(({ token, logprob, top }) => {
    const others = top.map((other) =>
      el(
        "li",
        other.token === token ? { className: "taken" } : {},
        el("code", {}, visible(other.token)),
        ` ${chance(other.logprob)}`,
      ),
    );
    return el(
      "div",
      {},
      el(
        "p",
        {},
        el("code", {}, visible(token)),
        logprob === null ? "" : ` ${chance(logprob)}, log-probability ${logprob.toFixed(3)}`,
      ),
      el("ol", {}, ...others),
    );
  });
}

const chance = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob < -5 ? 3 : 1)} %`;

/** Replaces white space by visible signs. */
const visible = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·") || "(no text)";
