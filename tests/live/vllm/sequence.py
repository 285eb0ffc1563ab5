"""Asks two engines in turn, one request at a time, and prints the hit ratio.

Nothing depends on time, so any two pairs of engines with caches of the same
bytes of text must report about the same. Run it before engines that have just
started.

usage: sequence.py HOST:PORT,HOST:PORT [SEED]
"""

import json
import random
import sys
import urllib.request

SYLLABLES = "an ber co dis el for gen hol in ker lo men no pre ra sen ti un ver wa".split()
SESSIONS, ACTIVE = 9, 3

engines = sys.argv[1].split(",")
rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)


def prose(tokens):
    text = ""
    while len(text) < tokens * 4:
        text += "".join(rng.choice(SYLLABLES) for _ in range(1 + rng.randrange(4)))
        text += "." * (rng.randrange(12) == 0) + " "
    return text[: tokens * 4]


def ask(engine, messages, tokens):
    body = {"model": "tiny", "ignore_eos": True, "max_tokens": tokens, "messages": messages}
    request = urllib.request.Request(f"http://{engine}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


system = prose(300)
waiting = []
for _ in range(SESSIONS):
    turns = rng.randint(3, 6)
    document = prose(rng.randint(500, 3000)) + "\n\n"
    questions = [prose(rng.randint(20, 120)) for _ in range(turns)]
    questions[0] = document + questions[0]
    lengths = [rng.randint(16, 40) for _ in range(turns)]
    waiting.append(([{"role": "system", "content": system}], list(zip(questions, lengths))))

active, asked, prompt, cached = [], 0, 0, 0
while waiting or active:
    while waiting and len(active) < ACTIVE:
        active.append(waiting.pop(0))
    messages, turns = session = rng.choice(active)
    question, tokens = turns.pop(0)
    messages.append({"role": "user", "content": question})
    answer = ask(engines[asked % len(engines)], messages, tokens)
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    usage = answer["usage"]
    prompt += usage["prompt_tokens"]
    cached += usage["prompt_tokens_details"]["cached_tokens"]
    asked += 1
    if not turns:
        active.remove(session)
print(f"{asked} requests, {prompt} prompt tokens, {100 * cached / prompt:.1f} % cached")
