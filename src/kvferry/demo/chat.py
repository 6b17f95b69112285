"""The demo's chat: a help desk whose long system prompt is the same for every question."""

import random
from pathlib import Path
from typing import Final, cast

ROUTES: Final = (
    ("Aldermouth", "Holm", 40, 6, ("06:10", "08:25", "11:40", "15:05", "18:30")),
    ("Aldermouth", "Skerry", 75, 9, ("06:45", "10:15", "14:20", "19:00")),
    ("Aldermouth", "Brannoch", 110, 14, ("07:30", "12:45", "17:50")),
    ("Holm", "Skerry", 35, 5, ("07:20", "09:35", "12:50", "16:15")),
    ("Holm", "Little Fen", 20, 3, ("06:55", "08:05", "10:40", "13:30", "16:45", "20:10")),
    ("Skerry", "Brannoch", 50, 7, ("08:30", "13:10", "18:05")),
    ("Brannoch", "North Quay", 65, 8, ("09:45", "15:25", "21:00")),
    ("Little Fen", "Otter Point", 15, 2, ("07:30", "11:20", "14:55", "19:40")),
    ("North Quay", "Otter Point", 90, 11, ("08:15", "16:35")),
    ("Otter Point", "Aldermouth", 55, 7, ("06:20", "12:05", "17:15")),
)

HARBOURS: Final = (
    "Aldermouth: the largest harbour, a ten minute walk downhill from the railway station. Tickets "
    "are sold in the white hall at pier two, and the boats for Brannoch leave from pier four.",
    "Holm: one stone pier on the south side of the island, with a kiosk for tea and rolls. In "
    "winter the pier can be icy, so please wait in the shelter until the ramp is down.",
    "Skerry: the boats land beside the lighthouse. There is no shop, but a well with good water; "
    "the last boat back is often full in August, so be there half an hour early.",
    "Brannoch: two piers, one of them for cars. The bus to the castle waits for every boat and "
    "leaves five minutes after it has landed; the driver sells the bus tickets.",
    "Little Fen: a wooden pier among the reeds. At very low water the boat lands at the sluice "
    "instead, four hundred metres further west along the dyke.",
    "North Quay: the workshops and the dry dock are here, so children have to be held by the hand "
    "as far as the gate. Visitors may see the engine museum on Saturdays.",
    "Otter Point: a floating pier in a quiet bay. The path to the bird hide starts behind the "
    "toilets, and the hide is closed while the terns are nesting in May and June.",
)

RULES: Final = (
    "Answer in one or two short sentences and name the place, the time and the price asked for.",
    "If a question is not about our ferries, say kindly that you can only help with ferries.",
    "Never promise a seat: on busy days the boats fill up, and who comes first goes aboard first.",
    "Children under six travel free with an adult; from six to fifteen they pay half the price.",
    "Dogs are welcome on the open deck, on a lead, and pay nothing; cats stay in their baskets.",
    "A bicycle costs two crowns more on every route, and a kayak four; both are loaded last.",
    "Cars are only carried between Aldermouth and Brannoch, and have to be booked a day ahead.",
    "In a storm the harbour master decides; a cancelled crossing is paid back in full.",
    "Lost things are kept in Aldermouth for thirty days, in the blue house beside the slipway.",
    "On Sundays the first boat of every route does not run, and the kiosks open at nine.",
    "A day ticket for all routes costs twenty-five crowns; it is sold aboard, in coins or by card.",
    "Groups of ten or more get a tenth off, if one of them asks for it at the ticket window.",
    "Parcels of up to twenty kilograms travel for three crowns; the crew hands them out.",
    "People with a wheelchair ring the bell at the ramp, and the crew comes down to help.",
)

QUESTION: Final = "When does the first ferry from Holm to Skerry leave, and what does it cost?"


def system_prompt() -> str:
    """About 1,500 tokens: who the help desk is, its rules, and the timetable in words."""
    lines = ["You are the help desk of the Seven Harbours ferry line.", "", "Rules:"]
    lines += [f"{number}. {rule}" for number, rule in enumerate(RULES, 1)]
    lines += ["", "Timetable:"]
    for start, end, minutes, crowns, times in ROUTES:
        lines.append(
            f"From {start} to {end}: the crossing takes {minutes} minutes and costs {crowns} "
            f"crowns. Boats leave {start} at {', '.join(times[:-1])} and {times[-1]}."
        )
        lines.append(
            f"From {end} back to {start}: each boat turns round after ten minutes at {end}."
        )
    lines += ["", "Harbours:", *(f"- {harbour}" for harbour in HARBOURS)]
    return "\n".join(lines)


def chat_tokens(model: Path) -> list[int]:
    """The chat as token ids, in the model's own chat format where its tokenizer has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    if tokenizer.chat_template is None:
        text = f"{system_prompt()}\n\nQuestion: {QUESTION}\nAnswer:"
    else:
        text = cast(
            str,
            tokenizer.apply_chat_template(
                [
                    {"role": "system", "content": system_prompt()},
                    {"role": "user", "content": QUESTION},
                ],
                tokenize=False,
                add_generation_prompt=True,
            ),
        )
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def other_prompt(tokens: list[int], seed: int) -> list[int]:
    """A prompt of the same length and shape that shares no block with the chat."""
    other = list(tokens)
    random.Random(seed).shuffle(other)
    return other
