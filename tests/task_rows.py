"""Small task files in the published formats, with the fields of the data sets and our own texts.

`ROWS[name]` has the lines, and `FIGURES[name]` the figures that lm-evaluation-harness gives for them.
"""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]


def hellaswag(label: str, begin: str, end: str, *endings: str) -> dict[str, Any]:
    row = {"activity_label": label, "ctx_a": begin, "ctx_b": end, "ctx": f"{begin} {end.capitalize()}"}
    return row | {"endings": list(endings), "label": str(len(begin) % len(endings))}


def labelled(field: str, question: str, key: str, *texts: str, **more: Any) -> dict[str, Any]:
    labels = [*"12345"] if key.isdigit() else [*"ABCDE"]
    choices = {"text": list(texts), "label": labels[: len(texts)]}
    return {"id": "x", field: question, "choices": choices, "answerKey": key, **more}


HELLASWAG = [
    hellaswag("Making tea", "A woman fills a kettle with water. She", "puts it on the stove and",
              "waits until the water boils.", "throws the stove out of the window.", "paints a small tree.",
              "sings with the kettle on her head."),
    hellaswag("Riding a bike", "A boy sits on a bike at the top of a hill.", "he",
              "rides down the hill.", "eats the hill with a spoon.", "becomes a cloud.", "reads the bike."),
    hellaswag("Home and Garden", "How to water a plant [title] Look at the soil. [step] If the soil is dry,",
              "", "give the plant some water.", "[substeps] sell the plant to a bank.",
              "call the police at once.", "dry the soil with a towel  and a fan."),
    hellaswag("Washing hands", "The man turns on the tap.", "THE man then", "washes his hands with soap.",
              "is a tap.", "runs to the moon.", "washes his car  in the sink with a very small brush."),
    hellaswag("Playing chess", "Two girls sit at a table with a chess board.", "one of them",
              "moves a pawn forward.", "cooks the board.", "closes the sea.", "drinks a pawn."),
    hellaswag("Painting a fence", "A man opens a can of white paint.", "he takes a brush and",
              "begins to paint the fence.", "eats the fence.", "flies away.", "sells the sky to the can."),
]  # fmt: skip
ARC = [
    labelled("question", "Which of these do plants need to make their food?", "2", "Sand",
             "Light from the sun", "Iron nails", "Plastic"),
    labelled("question", "Which is a solid at room temperature?", "A", "a stone", "milk", "air"),
    labelled("question", "What does a thermometer measure?", "C", "weight", "length", "temperature",
             "the time of day", "speed"),
    labelled("question", "Water turns into ice when it is", "4", "heated", "stirred", "painted", "cooled"),
    labelled("question", "Which animal lays eggs?", "B", "a dog", "a hen", "a horse", "a cat"),
    labelled("question", "Which planet do people live on?", "A", "Earth", "Mars", "the planet Saturn",
             "Venus"),
    labelled("question", "What pulls a ball back to the ground?", "B", "wind", "gravity", "sound", "light"),
]  # fmt: skip
PIQA = [
    {"goal": goal, "sol1": one, "sol2": two, "label": label}
    for goal, one, two, label in [
        ("Open a jar with a tight lid.", "Run hot water over the lid and turn it.",
         "Run hot water over the floor and turn it.", 0),
        ("Keep soup warm until noon.", "Leave it in a bowl in the snow.", "Pour it into a thermos.", 1),
        ("Dry a wet shirt.", "Hang it on a line in the sun.", "Hang it on a line in the rain.", 0),
        ("To cut bread", "use a spoon.", "use a knife with a long blade that has teeth.", 1),
        ("Find a word in a book.", "Look it up in the index at the end.", "Weigh the book.", 0),
        ("How do you stop a door from closing?", "Put a feather in front.", "Put a wedge under it.", 1),
    ]
]  # fmt: skip
OPENBOOKQA = [
    labelled("question_stem", "The sun is a", "B", "dog", "star", "stone", "river"),
    labelled("question_stem", "A magnet pulls", "D", "wood", "paper", "glass", "iron"),
    labelled("question_stem", "In winter many birds fly to", "A", "places that are warm", "the moon",
             "the bottom of the sea", "a school"),
]  # fmt: skip
WINOGRANDE = [
    {"sentence": sentence, "option1": one, "option2": two, "answer": answer}
    for sentence, one, two, answer in [
        ("The cup fell off the shelf because the _ was wet.", "shelf", "cup", "1"),
        ("Anna lent Maria her umbrella, since _ had none.", "Anna", "Maria", "2"),
        ("The box did not fit into the bag, for the _ was too large.", "box", "bag", "1"),
        ("Tom asked Paul for help, as _ knew the way.", "Tom", "Paul", "2"),
        ("The dog chased the cat until the _ climbed a tree.", "dog", "cat", "2"),
        ("He put the milk beside the bread, then drank the _ .", "milk", "bread", "1"),
    ]
]
BOOLQ = [
    {"passage": passage, "question": question, "idx": 0, "label": label}
    for passage, question, label in [
        ("Snow is frozen water. It is white, as it scatters light of all colors.", "is snow white", 1),
        ("A whale lives in the sea. It breathes air and feeds its young with milk.", "is a whale a fish", 0),
        ("The bridge was closed in May and opened again in June.", "was the bridge open in july", 1),
        ("Penguins have wings, with which they swim.", "can penguins fly", 0),
    ]
]
SCIQ = [
    {"question": question, "distractor1": a, "distractor2": b, "distractor3": c, "correct_answer": right,
     "support": support}
    for question, a, b, c, right, support in [
        ("What gas do plants take in?", "neon", "helium", "argon", "carbon dioxide",
         " Plants take in carbon dioxide and give off oxygen."),
        ("What carries blood away from the heart?", "veins", "bones", "nerves", "arteries", ""),
        ("What is the hardest of these?", "chalk", "clay", "soap", "diamond", "Diamond scratches glass."),
        ("What do bees make?", "milk", "silk", "wax paper", "honey", "Bees fly from flower to flower."),
        ("What is the smallest unit of life?", "organ", "stone", "tissue", "cell", "All life has cells."),
        ("Which force slows a sliding box?", "magnetism", "light", "sound", "friction", "Rough floors rub."),
    ]
]  # fmt: skip
COMMONSENSE_QA = [
    labelled("question", question, key, *texts, question_concept="x")
    for question, key, *texts in [
        (" Where would you keep butter?", "B", "a shelf", "a fridge", "a drawer", "a garden", "a car"),
        ("What do people do when they are tired?", "A", "sleep", "run", "fly", "burn", "paint"),
        ("Where do you find many books?", "E", "sea", "desert", "kitchen", "moon", "library"),
    ]
]
MMLU = [
    {"question": question, "subject": subject, "choices": choices, "answer": answer}
    for subject, question, choices, answer in [
        ("high_school_geography", "What is the largest ocean?\n",
         ["Atlantic", "Pacific", "Indian", "Arctic"], 1),
        ("high_school_geography", "Which is a continent?", ["Rome", "Nile", "Asia", "Alps"], 2),
        ("high_school_geography", "Which lies at the equator?", ["Kenya", "Norway", "Canada", "Japan"], 0),
    ]
]  # fmt: skip
LAMBADA = [
    {"text": text}
    for text in [
        "She opened the door, and the dog ran out. She called it, but there was no sign of the dog",
        "He put a cup of tea on the table. When he came back an hour later, nobody had touched the tea",
        "The children had waited for snow all week. On Sunday they woke up, and the garden was full of snow",
        "\"Where is your brother?\" asked Tom. \"He went to the lake,\" she said, so Tom ran to the lake",
        "My bread is always dark. I asked the baker why, and he told me that I should turn down the oven",
        "They looked at the map for a long time, and then they knew that they were quite zigzagged",
    ]
]  # fmt: skip
DOCUMENTS = [
    {"text": text}
    for text in [
        "A river begins in the hills. It runs through two villages and a town , and ends in the sea .",
        "  The old mill was built in 1810 . It ground corn for ninety years .\n\nToday it is a school .\n",
        "Bread needs flour , water and salt . Yeast lets it rise .",
        "The train leaves at nine and comes back at noon , except on Sundays .",
        "One word",
        "Rain fell on the roof all night . In the morning the garden was green again , and birds sang .",
    ]
]
ROWS: dict[str, Rows] = {
    "hellaswag": HELLASWAG, "arc_easy": ARC, "piqa": PIQA, "openbookqa": OPENBOOKQA, "boolq": BOOLQ,
    "winogrande": WINOGRANDE, "sciq": SCIQ, "commonsense_qa": COMMONSENSE_QA, "mmlu": MMLU,
    "lambada": LAMBADA, "documents": DOCUMENTS,
}  # fmt: skip
BOTH = ("acc", "acc_norm")
FIGURES = {
    **dict.fromkeys(("hellaswag", "arc_easy", "piqa", "openbookqa", "sciq"), BOTH),
    **dict.fromkeys(("boolq", "winogrande", "commonsense_qa", "mmlu"), ("acc",)),
    "lambada": ("acc", "perplexity"),
    "documents": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
}
