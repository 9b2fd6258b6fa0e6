//! Anchors in Rust sources.

use std::ops::Range;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Arm, Expr, Field, FieldValue, Fields, Ident, ImplItem, Item, Stmt, TraitItem, Variant};

use crate::anchor::{Anchor, AnchorError, Place, Target, exactly_one};
use crate::rust_container::{self, Body, Container};
use crate::rust_source::{Name, RustSource};

/// Finds an anchor. `text` is what is to be inserted there.
pub(crate) fn resolve(
    source: &RustSource<'_>,
    anchor: &Anchor,
    text: &str,
) -> Result<Target, AnchorError> {
    let containers = rust_container::find(source, &anchor.within)?;
    match &anchor.place {
        Place::After(name) | Place::Before(name) => {
            let element = find_element(source, anchor, &containers, name)?;
            Ok(match &anchor.place {
                Place::Before(_) => Target::Insert {
                    at: source.line_before(element.range.start),
                    comma: None,
                },
                _ => after(source, &element),
            })
        }
        Place::Start | Place::End => {
            let container = only(source, anchor, containers)?;
            let inside = container
                .inside
                .ok_or_else(|| AnchorError::NoBody(anchor.describe_container()))?;
            Ok(match anchor.place {
                Place::Start => Target::Insert {
                    at: source.line_after(inside.range.start).min(inside.range.end),
                    comma: None,
                },
                _ => Target::Insert {
                    at: end(source, &inside.range),
                    comma: inside
                        .has_commas
                        .then(|| source.missing_comma(&inside.range))
                        .flatten(),
                },
            })
        }
        Place::Imports => {
            check_imports(text)?;
            let container = only(source, anchor, containers)?;
            let (Body::Items(items), Some(inside)) = (&container.body, &container.inside) else {
                let container = anchor.describe_container();
                return Err(AnchorError::NoPlace(container, anchor.place.key()));
            };
            let last = items.iter().rfind(|item| matches!(item, Item::Use(_)));
            let at = match last {
                Some(last) => source.line_after(source.range(last).end),
                None => source.line_after(inside.range.start),
            };
            Ok(Target::Insert { at, comma: None })
        }
        Place::Rename(name) => {
            if syn::parse_str::<Ident>(name).is_err() {
                return Err(AnchorError::NoIdentifier(name.clone()));
            }
            let container = only(source, anchor, containers)?;
            let name = container.name.ok_or_else(|| {
                AnchorError::NoPlace(anchor.describe_container(), anchor.place.key())
            })?;
            Ok(Target::Replace(name))
        }
    }
}

/// Returns the only enclosing item that was found.
fn only(
    source: &RustSource<'_>,
    anchor: &Anchor,
    containers: Vec<Container>,
) -> Result<Container, AnchorError> {
    let describe = || anchor.describe_container();
    exactly_one(containers, source.text, describe, |container| {
        container.range.start
    })
}

/// Checks that a text consists of imports and declarations of modules.
fn check_imports(text: &str) -> Result<(), AnchorError> {
    let is_import = |item: &Item| match item {
        Item::Use(_) => true,
        Item::Mod(module) => module.content.is_none(),
        _ => false,
    };
    match syn::parse_file(text) {
        Ok(file) if file.attrs.is_empty() && file.items.iter().all(is_import) => Ok(()),
        _ => Err(AnchorError::NotImports),
    }
}

/// Returns the place of lines that precede a closing delimiter.
fn end(source: &RustSource<'_>, inside: &Range<usize>) -> usize {
    let line = crate::lines::start(source.text, inside.end);
    match line >= inside.start && source.text[line..inside.end].trim().is_empty() {
        true => line,
        false => inside.end,
    }
}

fn after(source: &RustSource<'_>, element: &Element) -> Target {
    let end = element.range.end;
    let comma = source.comma_after(end).filter(|_| element.has_comma);
    Target::Insert {
        at: source.line_after(comma.unwrap_or(end)),
        comma: (element.has_comma && comma.is_none()).then_some(end),
    }
}

/// Element of a list, or statement of a block.
struct Element {
    range: Range<usize>,
    /// True if a comma separates it from the next element.
    has_comma: bool,
}

/// Finds the innermost element that mentions a name.
fn find_element(
    source: &RustSource<'_>,
    anchor: &Anchor,
    containers: &[Container],
    name: &str,
) -> Result<Element, AnchorError> {
    let name = Name::new(name);
    let mut found: Vec<Element> = Vec::new();
    for container in containers {
        let mut finder = Finder {
            source,
            mentions: source.find(&name, &container.range),
            found: Vec::new(),
        };
        finder.search(&container.body);
        found.extend(finder.found);
    }
    // Enclosing items of the same name may enclose each other.
    let ranges: Vec<_> = found.iter().map(|element| element.range.clone()).collect();
    let mut seen = Vec::new();
    found.retain(|Element { range, .. }| {
        let is_innermost = !ranges
            .iter()
            .any(|other| other != range && range.start <= other.start && other.end <= range.end);
        let is_new = !seen.contains(range);
        seen.push(range.clone());
        is_innermost && is_new
    });
    let describe = || {
        let (Place::After(name) | Place::Before(name)) = &anchor.place else {
            return anchor.describe_container();
        };
        match anchor.within.as_slice() {
            [] => format!("`{name}`"),
            within => format!("`{name}` in `{}`", within.join("`, `")),
        }
    };
    exactly_one(found, source.text, describe, |element| element.range.start)
}

/// Search for the innermost elements that mention a name.
struct Finder<'a> {
    source: &'a RustSource<'a>,
    mentions: Vec<Range<usize>>,
    found: Vec<Element>,
}

impl Finder<'_> {
    fn search(&mut self, body: &Body) {
        match body {
            Body::Elements(elements) => self.check_list(elements),
            Body::Fields(fields) => {
                for field in fields {
                    self.check(field, true, |finder| visit::visit_field(finder, field));
                }
            }
            body => rust_container::visit_body(self, body),
        }
    }

    /// Adds an element if it mentions the name and no element inside of it does.
    fn check(&mut self, part: &impl Spanned, has_comma: bool, visit: impl FnOnce(&mut Self)) {
        self.check_range(self.source.range(part), has_comma, visit);
    }

    fn check_range(&mut self, range: Range<usize>, has_comma: bool, visit: impl FnOnce(&mut Self)) {
        let is_inside = |at: &Range<usize>| range.start <= at.start && at.end <= range.end;
        if !self.mentions.iter().any(is_inside) {
            return;
        }
        let before = self.found.len();
        visit(self);
        if self.found.len() == before {
            self.found.push(Element { range, has_comma });
        }
    }

    fn check_list(&mut self, elements: &[Expr]) {
        for element in elements {
            self.check(element, true, |finder| finder.visit_expr(element));
        }
    }
}

impl Visit<'_> for Finder<'_> {
    fn visit_item(&mut self, item: &Item) {
        self.check(item, false, |finder| visit::visit_item(finder, item));
    }

    fn visit_impl_item(&mut self, item: &ImplItem) {
        self.check(item, false, |finder| visit::visit_impl_item(finder, item));
    }

    fn visit_trait_item(&mut self, item: &TraitItem) {
        self.check(item, false, |finder| visit::visit_trait_item(finder, item));
    }

    fn visit_stmt(&mut self, statement: &Stmt) {
        self.check(statement, false, |finder| {
            visit::visit_stmt(finder, statement);
        });
    }

    fn visit_variant(&mut self, variant: &Variant) {
        self.check(variant, true, |finder| {
            visit::visit_variant(finder, variant);
        });
    }

    fn visit_fields(&mut self, fields: &Fields) {
        if let Fields::Named(fields) = fields {
            for field in &fields.named {
                self.visit_field(field);
            }
        }
    }

    fn visit_field(&mut self, field: &Field) {
        self.check(field, true, |finder| visit::visit_field(finder, field));
    }

    fn visit_arm(&mut self, arm: &Arm) {
        // The syntax tree has the comma in the arm.
        let range = self.source.range(arm).start..self.source.range(&arm.body).end;
        let has_comma = rust_container::has_comma(arm);
        self.check_range(range, has_comma, |finder| visit::visit_arm(finder, arm));
    }

    fn visit_field_value(&mut self, value: &FieldValue) {
        self.check(value, true, |finder| {
            visit::visit_field_value(finder, value);
        });
    }

    fn visit_expr_array(&mut self, array: &syn::ExprArray) {
        let elements: Vec<_> = array.elems.iter().cloned().collect();
        self.check_list(&elements);
    }
}
